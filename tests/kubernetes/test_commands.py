"""The `edl` command, from a shell whose kubeconfig leads to a real cluster."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from support.backends.jobs import WAITS, job, reach, says
from support.cluster.cluster import Cluster
from support.cluster.pod_faults import kubeconfig_with, leaving_nothing, token_of

from edl_runtime.backends.base import Backend
from edl_runtime.pods import Pod

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

EDL = [sys.executable, "-P", "-m", "edl_runtime.cli"]
WRITES = "import time\nprint('first', flush=True)\nwhile True: time.sleep(0.1); print('more', flush=True)"


@pytest.fixture
async def backend(cluster: Cluster) -> AsyncIterator[Backend]:
    """What commands find there; what they leave is counted."""
    async with leaving_nothing(cluster.backend(), cluster) as made:
        yield made


def environ(cluster: Cluster, **more: str) -> dict[str, str]:
    """Return the variables that lead to the tests' namespace."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    where = {"KUBECONFIG": cluster.kubeconfig, "EDL_BACKEND": "kubernetes", "EDL_KUBE_NAMESPACE": cluster.namespace}
    return {**clean, **where, **more}


async def edl(*arguments: str, env: dict[str, str]) -> tuple[int | None, str, str]:
    """Run the command; return its exit status and what it wrote to stdout and to stderr."""
    process = await asyncio.create_subprocess_exec(*EDL, *arguments, stdout=PIPE, stderr=PIPE, env=env)
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.deep
async def test_logs_of_pods_that_never_start_say_why_and_end(backend: Backend, cluster: Cluster) -> None:
    """A name that no image can have fails the job; whoever follows its log sees that, and is let go."""
    spec = msgspec.structs.replace(job(WAITS, kind="trainer"), pod=Pod(image="docker.io/UPPER:1"))
    await backend.submit(spec, token="mine", secrets={})
    status, out, err = await edl("logs", "-f", "job", env=environ(cluster))
    assert (status, out) == (0, "")
    assert err.splitlines()[-1].startswith("edl: instance 0 can't start: ")
    assert "docker.io/UPPER:1" in err


@pytest.mark.deep
async def test_logs_end_quietly_when_nobody_reads_on(backend: Backend, cluster: Cluster) -> None:
    """As with `head`."""
    await backend.submit(job(WRITES, kind="trainer"), token="mine", secrets={})
    await says(backend, "first")
    out, into = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *EDL, "logs", "-f", "job", stdout=into, stderr=PIPE, env=environ(cluster)
    )
    os.close(into)
    assert await asyncio.to_thread(os.read, out, 9) == b"[0] first"
    os.close(out)
    async with asyncio.timeout(60):
        assert await process.communicate() == (None, b"")
    assert process.returncode == 1


async def test_pods_are_monitored(backend: Backend, cluster: Cluster) -> None:
    """A line for each look, also of a pod that has no room, with the share of the nodes' CPUs; SIGTERM ends it."""
    for name, cpu in (("fits", "50m"), ("waits", "900")):
        spec = job(WAITS, name=name, kind="trainer", instances=2)
        await backend.submit(msgspec.structs.replace(spec, pod=Pod(resources={"cpu": cpu})), token="mine", secrets={})
    await reach(backend, "fits", lambda status: [one.phase for one in status.instances] == ["running"] * 2)
    process = await asyncio.create_subprocess_exec(*EDL, "monitor", "--every", "0.5", stdout=PIPE, env=environ(cluster))
    assert process.stdout
    async with asyncio.timeout(60):
        lines = [(await process.stdout.readline()).decode().rstrip("\n").split("\t") for _ in range(4)]
        process.terminate()
        assert await process.wait() == 0
    assert lines[0][:4] == ["SUBMITTED-JOBS", "PENDING-JOBS", "RUNNING-TRAINERS", "CPU-UTILS"]
    assert [line[:3] for line in lines[1:]] == [["2", "1", "fits:2|waits:0"]] * 3
    assert all(0 < float(line[3].removesuffix("%")) <= 100 for line in lines[1:])


@pytest.mark.deep
async def test_jobs_are_monitored_where_nodes_may_not_be_seen(
    backend: Backend, cluster: Cluster, tmp_path: Path
) -> None:
    """A role for one namespace shows them, and what it does not show is said."""
    rights = {"batch/jobs": ["*"], "apps/deployments": ["*"], "/pods": ["*"], "/events": ["*"]}
    token = await token_of(cluster, rights)
    await backend.submit(job(WAITS, kind="trainer"), token="mine", secrets={})
    await reach(backend, "job", lambda status: [one.phase for one in status.instances] == ["running"])
    env = environ(cluster, KUBECONFIG=kubeconfig_with(cluster, tmp_path / "weak", token=token))
    for words in (["--once"], ["--once", "--json"]):
        status, out, _ = await edl("monitor", *words, env=env)
        assert status == 0
        assert "what nodes have is unknown: " in out
    seen = msgspec.json.decode(out)
    assert (seen["trainers"], seen["use"]) == ({"job": 1}, {})


@pytest.mark.deep
async def test_a_stop_says_that_the_log_could_not_be_kept(backend: Backend, cluster: Cluster, tmp_path: Path) -> None:
    """The job is gone all the same."""
    rights = {"batch/jobs": ["*"], "apps/deployments": ["*"], "/pods": ["*"], "/configmaps": ["get", "list"]}
    token = await token_of(cluster, rights)
    await backend.submit(job(WAITS, kind="trainer", name="unkept"), token="mine", secrets={})
    await reach(backend, "unkept", lambda status: [one.phase for one in status.instances] == ["running"])
    weak = environ(cluster, KUBECONFIG=kubeconfig_with(cluster, tmp_path / "weak", token=token))
    status, out, err = await edl("stop", "unkept", env=weak)
    assert await backend.list() == []
    assert (status, out) == (0, "unkept is gone; what it wrote could not be kept\n"), err
