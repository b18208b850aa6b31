"""What the demo's commands refuse, how they exit, and which pods are a node's."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import click
import psutil
import pytest
from click.testing import CliRunner

from edl_runtime.backends.local.instances import ProcessTable
from edl_runtime.demo.command import run_command
from edl_runtime.demo.errors import PodFailedError
from edl_runtime.demo.job_client import job_client
from edl_runtime.demo.job_server import job_server
from edl_runtime.demo.node import local_pods
from edl_runtime.demo.pod_processes import LocalPod, PodScript
from edl_runtime.demo.pod_sets import Nodes, first_pods
from edl_runtime.errors import SpecError


@pytest.mark.parametrize(
    ("flags", "field"), [("--time_interval_to_change nan", "time_interval_to_change"), ("--job_id __", "job_id")]
)
def test_a_server_that_no_job_could_use_does_not_start(flags: str, field: str) -> None:
    """It would change its pods without a pause, or answer no client."""
    refused = CliRunner().invoke(job_server, [*flags.split(), "--host", "0.0.0.0"]).exception
    assert isinstance(refused, SpecError)
    assert field in refused.field


def test_a_folder_of_logs_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    """As a flag that is wrong."""
    (tmp_path / "file").touch()
    environ = {"PADDLE_JOBSERVER": "http://127.0.0.1:1", "PADDLE_JOB_ID": "j"}
    command = ["--log_dir", str(tmp_path / "file"), "script.sh"]
    refused = CliRunner().invoke(job_client, command, env=environ).exception
    assert isinstance(refused, SpecError)
    assert refused.field == "--log_dir"


async def test_a_pod_whose_log_can_not_be_written_fails(tmp_path: Path) -> None:
    """As a pod, with the reason."""
    script = PodScript("x.sh", (), package="", folder=None, logs=tmp_path / "none", grace_s=1.0)
    pod = LocalPod("p", 0, script, {}, processes=ProcessTable(None), after=None, on_change=asyncio.Event().set)
    with pytest.raises(PodFailedError, match="p could not be started"):
        await pod.run()


@pytest.mark.parametrize(("exit_code", "status"), [(65, 65), (78, 78), (3, 1)])
def test_a_client_exits_as_a_pod_that_can_never_work(
    exit_code: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command
    def fails() -> None:
        raise PodFailedError("p", exit_code, "", "log", ())

    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(SystemExit) as ended:
        run_command(fails)
    assert ended.value.code == status


def test_pods_at_any_address_of_this_node_are_its_own() -> None:
    """Also where its name is that of the loopback address, as Debian has it."""
    of_all = (each for of_one in psutil.net_if_addrs().values() for each in of_one)
    addresses = {each.address for each in of_all if each.family == socket.AF_INET}
    pods = first_pods(Nodes((*sorted(addresses), "localhost", "192.0.2.250"), pods=1, gpus=0), "j")
    assert {pod.addr for pod in local_pods(pods).values()} == addresses | {"localhost"}
