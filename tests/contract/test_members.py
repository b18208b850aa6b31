"""A pool, and elastic trainers, survive their bad members."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.backends.jobs import WAITS, add_places, breaks, ended, eventually, job, lines, reach, says, takes_a_place

from edl_runtime.backends.interface import Backend, JobStatus
from edl_runtime.errors import EX_CONFIG, EX_DATAERR
from edl_runtime.specs import Bounds, JobSpec

NEVER_AT_1 = breaks("1", EX_CONFIG) + WAITS
"""Instance 1 can never work as configured; the others do."""


def gave_up(status: JobStatus) -> bool:
    return any(instance.given_up for instance in status.instances)


async def one_without_a_place(backend: Backend, folder: Path, spec: JobSpec) -> JobStatus:
    """Give the status of a job of two instances, of which the one that comes later finds no place and gives up.

    Of trainers that is instance 1; a pool's instances are numbered by age, in seconds where a cluster tells it.
    """
    add_places(folder, 1)
    await backend.submit(spec, token="mine", secrets={})
    await says(backend, "up")
    await backend.resize("job", 2)
    return await reach(backend, "job", gave_up)


@pytest.mark.on_pods
async def test_a_pool_goes_on_without_an_instance_that_can_never_work(backend: Backend, tmp_path: Path) -> None:
    """Exit status 78 gives up that instance alone; the status says why, and how many instances there can still be."""
    status = await one_without_a_place(backend, tmp_path, job(takes_a_place(tmp_path) + WAITS))
    assert (status.phase, status.wanted, status.attainable) == ("running", 2, 1)
    healthy, bad = sorted((await backend.get("job")).instances, key=lambda instance: instance.given_up)
    assert status.reason == f"instance {bad.index} exited with 78, which says that it can never work as configured"
    assert status.last_lines == ("no such model",)
    assert (healthy.phase, healthy.restarts, healthy.given_up) == ("running", 0, False)
    assert (bad.phase, bad.given_up, bad.exit_code) == ("failed", True, EX_CONFIG)


async def test_a_pool_fails_when_none_of_its_instances_can_ever_work(backend: Backend) -> None:
    """With nobody left to go on with, the pool says what the last one said."""
    await backend.submit(job("print('no such model'); raise SystemExit(78)", instances=2), token="mine", secrets={})
    status = await ended(backend)
    assert status.phase == "failed"
    assert status.reason.endswith("exited with 78, which says that it can never work as configured")
    assert status.last_lines == ("no such model",)


@pytest.mark.on_pods
async def test_growing_tries_an_instance_that_was_given_up_anew(backend: Backend, tmp_path: Path) -> None:
    """A larger size starts what was given up once more, and leaves the others alone."""
    await one_without_a_place(backend, tmp_path, job(takes_a_place(tmp_path) + WAITS))
    add_places(tmp_path, 3)  # one is taken and left again where it was just tried anew
    await backend.resize("job", 3)
    await says(backend, "up", instances=3)
    assert await lines(backend, instance=0) == [(0, "up")]
    status = await reach(backend, "job", lambda status: not gave_up(status))
    assert (status.reason, status.attainable) == ("", 3)


async def test_shrinking_drops_an_instance_that_was_given_up(backend: Backend, tmp_path: Path) -> None:
    """Once it is not wanted any more there is nothing wrong with the pool."""
    await one_without_a_place(backend, tmp_path, job(takes_a_place(tmp_path) + WAITS))
    assert (await backend.resize("job", 1)).wanted == 1
    status = await reach(backend, "job", lambda status: len(status.instances) == 1)
    assert (status.phase, status.reason, status.last_lines, status.attainable) == ("running", "", (), 1)


ENDS_WHEN_TOLD = """
import os, pathlib, sys, time
print("up")
go = pathlib.Path(os.environ["GO"])
while not go.exists():
    time.sleep(0.02)
sys.exit(int(go.read_text() or 0))
"""


@pytest.mark.on_pods
async def test_elastic_trainers_go_on_without_one_that_gives_up(backend: Backend, tmp_path: Path) -> None:
    """Exit status 78 speaks for that instance alone. A larger number tries anew; the job ends as the others do."""
    code = takes_a_place(tmp_path, "another dataset") + ENDS_WHEN_TOLD
    spec = job(code, kind="trainer", elastic=True, env={"GO": str(tmp_path / "go")})
    status = await one_without_a_place(backend, tmp_path, spec)
    said = "instance 1 exited with 78, which says that it can never work as configured"
    assert (status.phase, status.reason, status.last_lines) == ("running", said, ("another dataset",))
    assert status.attainable == 1
    add_places(tmp_path, 1)
    await backend.resize("job", 3)
    await says(backend, "up", instances=2)

    async def another_gave_up() -> bool:
        return [line for _, line in await lines(backend)].count("another dataset") == 2

    await eventually(another_gave_up, "one more without a place")
    status = await reach(backend, "job", gave_up)
    assert (status.wanted, status.attainable) == (3, 2)
    (tmp_path / "go").touch()
    status = await ended(backend)
    assert (status.phase, status.reason) == ("succeeded", "")
    assert sorted(instance.given_up for instance in status.instances) == [False, False, True]


@pytest.mark.parametrize(("fewest", "code"), [(1, "raise SystemExit(78)"), (2, NEVER_AT_1)])
async def test_elastic_trainers_fail_when_too_few_are_left(backend: Backend, fewest: int, code: str) -> None:
    """All have given up, or so many that the bounds' least can't be there: nobody waits for them for ever."""
    spec = job(code, kind="trainer", elastic=True, instances=2)
    await backend.submit(msgspec.structs.replace(spec, bounds=Bounds(fewest, 4)), token="mine", secrets={})
    status = await ended(backend)
    assert status.phase == "failed"
    assert status.reason.endswith("exited with 78, which says that it can never work as configured")
    assert status.failed_permanently


@pytest.mark.parametrize(("exit_code", "hopeless"), [(EX_DATAERR, True), (1, False)])
async def test_an_elastic_trainer_says_by_its_status_that_the_job_has_failed(
    backend: Backend, tmp_path: Path, exit_code: int, *, hopeless: bool
) -> None:
    """Any that is neither 0 nor 78, whoever else runs or has given up; 65 says that another try is pointless."""
    code = breaks("1", EX_CONFIG) + ENDS_WHEN_TOLD
    spec = job(code, kind="trainer", elastic=True, instances=2, env={"GO": str(tmp_path / "go")})
    await backend.submit(spec, token="mine", secrets={})
    await reach(backend, "job", gave_up)
    (tmp_path / "code").write_text(str(exit_code))
    (tmp_path / "code").rename(tmp_path / "go")
    status = await ended(backend)
    assert (status.phase, status.reason) == ("failed", f"instance 0 exited with {exit_code}")
    assert status.failed_permanently is hopeless
