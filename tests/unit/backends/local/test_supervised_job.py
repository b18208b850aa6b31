"""A job's decisions on instances that end, with made-up ones."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.local import supervisor
from edl_runtime.backends.local.backend import Accepted, ResizeRequest
from edl_runtime.backends.local.instances import FailureDetail
from edl_runtime.backends.local.job_folders import JobFolder
from edl_runtime.backends.local.supervisor import SupervisedJob, indexes_for
from edl_runtime.backends.restarts import RestartPolicy
from edl_runtime.exit_status import describe_exit
from edl_runtime.specs import Bounds, JobKind, JobSpec

IMPATIENT = RestartPolicy(initial_delay_s=0.0, healthy_after_s=0.0, max_hourly_exits=3)
"""Every life counts as a long one."""

AT_ONCE = RestartPolicy(initial_delay_s=0.0, healthy_after_s=3600.0)
"""Every life counts as a short one."""


class Ends:
    """Instances that end at once, with `exit_code`, but those that `stay`."""

    def __init__(self, exit_code: int = -9, stay: Callable[[int, int], bool] = lambda *_: False) -> None:
        self.started = 0
        self._exit_code = exit_code
        self._stay = stay

    def start(self, index: int) -> Any:
        self.started += 1
        stays = self._stay(index, self.started)

        async def run(leave: asyncio.Event, grace_s: float) -> int:  # noqa: ARG001
            if stays:
                await leave.wait()
            return self._exit_code

        return SimpleNamespace(pid=index, run=run)

    def failure(self, index: int, reason: str) -> FailureDetail:
        return FailureDetail(f"instance {index} {reason}")


def _job(
    folder: Path, instances: Any, kind: JobKind, *, restarts: RestartPolicy = IMPATIENT, wanted: int = 1
) -> SupervisedJob:
    bounds = Bounds(1, wanted)
    spec = JobSpec(name="job", kind=kind, command=("t",), bounds=bounds, instances=wanted, elastic=kind == "trainer")
    status = JobStatus(
        name="job",
        kind=kind,
        phase="running",
        token="t",
        digest=spec.digest,
        wanted=wanted,
        created_at=1.0,
        elastic=True,
    )
    return SupervisedJob(spec, status=status, folder=JobFolder(folder), instances=instances, restarts=restarts)


async def _end_of(job: SupervisedJob, folder: Path) -> JobStatus:
    await asyncio.wait_for(job.run(), 60)
    job.close()
    status = JobFolder(folder).read_status()
    assert status
    assert status.phase == "failed"
    return status


async def test_elastic_trainers_that_are_killed_for_ever_end_their_job(tmp_path: Path) -> None:
    """Though each lives long enough to start with a clean record."""
    killed = Ends()
    status = await _end_of(_job(tmp_path, killed, "trainer"), tmp_path)
    said = f"instance 0 ended 4 times within an hour, the last time it {describe_exit(-9)}"
    assert (status.reason, killed.started) == (said, 4)


async def test_a_pool_goes_on_however_often_one_is_killed(tmp_path: Path) -> None:
    """Each answers questions meanwhile."""
    killed = Ends(stay=lambda _, lives: lives > 20)
    job = _job(tmp_path, killed, "pool")
    running = asyncio.ensure_future(job.run())
    while killed.started <= 20 and not running.done():  # noqa: ASYNC110 -- a made-up instance has no events
        await asyncio.sleep(0)
    assert not running.done()
    job.stop("the test is over")
    await running


@pytest.mark.parametrize("wanted", [1, 3])
async def test_a_pool_of_which_all_keep_breaking_fails(tmp_path: Path, wanted: int) -> None:
    """None is started for ever, and those that only ever end don't keep each other's pool alive."""
    broken = Ends(1)
    status = await _end_of(_job(tmp_path, broken, "pool", restarts=AT_ONCE, wanted=wanted), tmp_path)
    assert "ended 5 times in a row within 3600 s of its start, the last time it exited with 1" in status.reason
    assert broken.started >= 5 * wanted
    assert wanted > 1 or broken.started == 5


async def test_an_elastic_trainer_that_is_killed_again_and_again_fails_its_job(tmp_path: Path) -> None:
    """Whatever other instances do: they have no use for one that never comes up."""
    killed = Ends(stay=lambda index, _: index == 1)
    status = await _end_of(_job(tmp_path, killed, "trainer", restarts=AT_ONCE, wanted=2), tmp_path)
    assert re.fullmatch(
        "instance 0 ended 5 times in a row .*, the last time it was killed by SIGKILL .*", status.reason
    )


async def test_an_instance_that_keeps_breaking_does_not_end_who_works(tmp_path: Path) -> None:
    """It is tried again and again, and the status says what is wrong with it."""
    broken = Ends(1, stay=lambda index, _: index == 0)
    job = _job(tmp_path, broken, "pool", restarts=AT_ONCE, wanted=2)
    running = asyncio.ensure_future(job.run())
    while broken.started < 20 and not running.done():  # noqa: ASYNC110 -- a made-up instance has no events
        await asyncio.sleep(0)
    told = job.answer(ResizeRequest(2))
    assert isinstance(told, Accepted)
    status = told.status
    assert (status.phase, status.wanted, status.attainable) == ("running", 2, 2)
    assert re.fullmatch("instance 1 ended 1[0-9] times in a row .*, the last time it exited with 1", status.reason)
    job.stop("the test is over")
    await running


class Unstartable(Ends):
    """Instances that stay, but the second can't be started."""

    def __init__(self) -> None:
        super().__init__(stay=lambda *_: True)

    def start(self, index: int) -> Any:
        if index == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().start(index)


@pytest.mark.parametrize("kind", ["pool", "trainer"])
async def test_an_instance_that_cant_be_started_does_not_end_who_works(tmp_path: Path, kind: JobKind) -> None:
    """As when the disk is full: the others go on, and the status says what is wrong."""
    job = _job(tmp_path, Unstartable(), kind, wanted=2)
    running = asyncio.ensure_future(job.run())
    while not (status := JobFolder(tmp_path)._read_status()) or not status.reason:  # noqa: ASYNC110 -- as above
        await asyncio.sleep(0)
    assert (status.phase, status.attainable) == ("running", 1)
    assert status.reason == "instance 1 could not be started: [Errno 28] No space left on device"
    job.stop("the test is over")
    await running


async def test_a_status_that_cant_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another change of the job, once there is room."""
    monkeypatch.setattr(supervisor, "SAVE_AGAIN_S", 0.001)
    job = _job(tmp_path, Ends(stay=lambda *_: True), "pool", wanted=2)
    running = asyncio.ensure_future(job.run())
    await asyncio.sleep(0)
    tries: list[int] = []
    written = asyncio.Event()

    def full_at_first(_: JobFolder, status: JobStatus) -> None:
        tries.append(status.wanted)
        if len(tries) < 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.set()

    monkeypatch.setattr(JobFolder, "write_status", full_at_first)
    job.answer(ResizeRequest(1))
    await asyncio.wait_for(written.wait(), 60)
    assert tries[-1] == 1
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
