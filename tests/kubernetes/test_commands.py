"""`edl monitor` with a kubeconfig of a real cluster."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE

import msgspec
import pytest
from support.backends.jobs import WAITS, job, reach
from support.cluster.cluster import Cluster

from edl_runtime.backends.interface import Backend
from edl_runtime.pods import Pod

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


async def test_monitor_prints_pods_and_the_share_of_reserved_cpus(backend: Backend, cluster: Cluster) -> None:
    """A line each interval, also with a pod that can't be scheduled; SIGTERM ends it."""
    for name, cpu in (("fits", "50m"), ("waits", "900")):
        spec = job(WAITS, name=name, kind="trainer", instances=2)
        await backend.submit(msgspec.structs.replace(spec, pod=Pod(resources={"cpu": cpu})), token="mine", secrets={})
    await reach(backend, "fits", lambda status: [one.phase for one in status.instances] == ["running"] * 2)
    command = ["-P", "-m", "edl_runtime.cli", "monitor", "--every", "0.5"]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE, env=cluster.environ())
    assert process.stdout
    async with asyncio.timeout(300):
        lines = [(await process.stdout.readline()).decode().rstrip("\n").split("\t") for _ in range(4)]
        process.terminate()
        assert await process.wait() == 0
    assert lines[0][:4] == ["SUBMITTED-JOBS", "PENDING-JOBS", "RUNNING-TRAINERS", "CPU-UTILS"]
    assert [line[:3] for line in lines[1:]] == [["2", "1", "fits:2|waits:0"]] * 3
    assert all(0 < float(line[3].removesuffix("%")) <= 100 for line in lines[1:])
