"""A job's decisions on instances that end, with made-up ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edl_runtime.backends.base import JobStatus
from edl_runtime.backends.local.folders import JobFolder
from edl_runtime.backends.local.job import Job, indexes_for
from edl_runtime.backends.local.restarts import RestartPolicy
from edl_runtime.backends.local.slots import Trouble
from edl_runtime.specs import Bounds, JobKind, JobSpec

IMPATIENT = RestartPolicy(first_delay_s=0.0, healthy_after_s=0.0, most_an_hour=3)
"""Every life counts as a long one."""


class Killed:
    """Instances that live for a moment, until `stays` of them have been killed: then the next one stays."""

    def __init__(self, stays: int = 1_000) -> None:
        self.started = 0
        self._stays = stays

    def start(self, index: int) -> Any:
        self.started += 1
        lives = self.started

        async def run(leave: asyncio.Event, grace_s: float) -> int:  # noqa: ARG001
            if lives > self._stays:
                await leave.wait()
            return -9

        return SimpleNamespace(pid=index, run=run)

    def trouble(self, index: int, reason: str) -> Trouble:
        return Trouble(f"instance {index} {reason}")


def _job(folder: Path, instances: Any, kind: JobKind) -> Job:
    spec = JobSpec(name="job", kind=kind, command=("t",), bounds=Bounds(1, 1), instances=1, elastic=kind == "trainer")
    status = JobStatus(
        name="job", kind=kind, phase="running", token="t", digest=spec.digest, wanted=1, created_at=1.0, elastic=True
    )
    return Job(spec, status=status, folder=JobFolder(folder), instances=instances, restarts=IMPATIENT)


@pytest.mark.timeout(20)
async def test_elastic_trainers_that_are_killed_for_ever_end_their_job(tmp_path: Path) -> None:
    """Though each lives long enough to start with a clean record."""
    killed = Killed()
    job = _job(tmp_path, killed, "trainer")
    await job.run()
    job.close()
    status = JobFolder(tmp_path).read_status()
    assert status
    said = "instance 0 ended 4 times within an hour, the last time it was killed by SIGKILL"
    assert (status.phase, status.reason, killed.started) == ("failed", said, 4)


@pytest.mark.timeout(20)
async def test_a_pool_goes_on_however_often_one_is_killed(tmp_path: Path) -> None:
    """Each answers questions meanwhile."""
    killed = Killed(stays=20)
    job = _job(tmp_path, killed, "pool")
    running = asyncio.ensure_future(job.run())
    while killed.started <= 20:  # noqa: ASYNC110 -- a made-up instance has no events
        await asyncio.sleep(0)
    assert not running.done()
    job.stop("the test is over")
    await running


@pytest.mark.parametrize(
    ("instances", "living", "given_up", "indexes"),
    [
        (3, [0], [], [0, 1, 2]),
        (2, [0, 1, 2], [], [0, 1]),
        (0, [0, 1], [2], []),
        (2, [], [], [0, 1]),
        (2, [0, 1], [], [0, 1]),
        (4, [1, 2, 3], [0], [0, 1, 2, 3]),
        (3, [1, 2, 3], [0], [1, 2, 3]),
        (2, [1, 2, 3], [0], [1, 2]),
        (3, [3], [0, 1, 2], [1, 2, 3]),
        (2, [1, 3], [0, 2], [1, 3]),
        (3, [1, 3], [], [0, 1, 3]),
        (5, [1, 3], [0, 2], [0, 1, 2, 3, 4]),
        (1, [], [0, 1], [1]),
    ],
)
def test_a_job_is_resized_by_those_that_live(
    instances: int, living: list[int], given_up: list[int], indexes: list[int]
) -> None:
    """Nobody has to leave for one that was given up, and a larger number tries that one anew."""
    assert sorted(indexes_for(instances, living, given_up)) == indexes
