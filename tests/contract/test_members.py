"""A pool, and elastic trainers, survive their bad members."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from contract.asking import WAITS, breaks, ended, eventually, job, lines, reach, says

from edl_runtime.backends.base import Backend, JobStatus
from edl_runtime.errors import EX_CONFIG, EX_DATAERR
from edl_runtime.specs import Bounds

NEVER_AT_1 = breaks("1", EX_CONFIG) + WAITS
"""Instance 1 can never work as configured; the others do."""


def gave_up(status: JobStatus) -> bool:
    return any(instance.given_up for instance in status.instances)


async def test_a_pool_goes_on_without_an_instance_that_can_never_work(backend: Backend) -> None:
    """Exit status 78 gives up that instance alone; the status says why, and how many instances there can still be."""
    await backend.submit(job(NEVER_AT_1, instances=2), token="mine", secrets={})
    status = await reach(backend, "job", gave_up)
    await says(backend, "up")
    assert (status.phase, status.wanted, status.attainable) == ("running", 2, 1)
    assert status.reason == "instance 1 exited with 78, which says that it can never work as configured"
    assert status.last_lines == ("no such model",)
    healthy, bad = (await backend.get("job")).instances
    assert (healthy.phase, healthy.restarts, healthy.given_up) == ("running", 0, False)
    assert (bad.phase, bad.restarts, bad.exit_code) == ("failed", 0, EX_CONFIG)


async def test_a_pool_fails_when_none_of_its_instances_can_ever_work(backend: Backend) -> None:
    """With nobody left to go on with, the pool says what the last one said."""
    await backend.submit(job("print('no such model'); raise SystemExit(78)", instances=2), token="mine", secrets={})
    status = await ended(backend)
    assert status.phase == "failed"
    assert status.reason.endswith("exited with 78, which says that it can never work as configured")
    assert status.last_lines == ("no such model",)


async def test_growing_tries_an_instance_that_was_given_up_anew(backend: Backend) -> None:
    """A larger size starts what was given up once more, and leaves the others alone."""
    await backend.submit(job(NEVER_AT_1, instances=2), token="mine", secrets={})
    await reach(backend, "job", gave_up)
    await backend.resize("job", 3)
    await says(backend, "up", instances=2)

    async def tried() -> list[tuple[int, str]]:
        await reach(backend, "job", gave_up)
        return await lines(backend, instance=1)

    assert await tried() == [(1, "no such model")] * 2
    assert await lines(backend, instance=0) == [(0, "up")]


async def test_shrinking_drops_an_instance_that_was_given_up(backend: Backend) -> None:
    """Once it is not wanted any more there is nothing wrong with the pool."""
    await backend.submit(job(NEVER_AT_1, instances=2), token="mine", secrets={})
    await reach(backend, "job", gave_up)
    assert (await backend.resize("job", 1)).wanted == 1
    status = await reach(backend, "job", lambda status: len(status.instances) == 1)
    assert (status.phase, status.reason, status.last_lines, status.attainable) == ("running", "", (), 1)


async def test_a_trainer_that_can_never_work_fails_its_job(backend: Backend) -> None:
    """A trainer job has no members to spare."""
    await backend.submit(job(NEVER_AT_1, kind="trainer", instances=2), token="mine", secrets={})
    status = await ended(backend)
    assert (status.phase, status.reason) == ("failed", "instance 1 exited with 78")


GIVES_UP_AT_1 = """
import os, pathlib, sys, time
if os.environ["EDL_INSTANCE"] == "1":
    print("another dataset")
    sys.exit(78)
print("up")
go = pathlib.Path(os.environ["GO"])
while not go.exists():
    time.sleep(0.02)
sys.exit(int(go.read_text() or 0))
"""
"""Instance 1 gives up; the others end as they are told to."""


async def test_elastic_trainers_go_on_without_one_that_gives_up(backend: Backend, tmp_path: Path) -> None:
    """Exit status 78 speaks for that instance alone. A larger number tries it again; the job ends as the others do."""
    spec = job(GIVES_UP_AT_1, kind="trainer", elastic=True, instances=2, env={"GO": str(tmp_path / "go")})
    await backend.submit(spec, token="mine", secrets={})
    status = await reach(backend, "job", gave_up)
    said = "instance 1 exited with 78, which says that it can never work as configured"
    assert (status.phase, status.reason, status.last_lines) == ("running", said, ("another dataset",))
    assert status.attainable == 1
    await says(backend, "up")
    await backend.resize("job", 3)
    await says(backend, "up", instances=2)

    async def tried_again() -> bool:
        return len(await lines(backend, instance=1)) == 2

    await eventually(tried_again, "instance 1 tried again")
    await reach(backend, "job", gave_up)
    (tmp_path / "go").touch()
    status = await ended(backend)
    assert (status.phase, status.reason) == ("succeeded", "")
    assert [instance.given_up for instance in status.instances] == [False, True, False]


@pytest.mark.parametrize(("fewest", "code"), [(1, "raise SystemExit(78)"), (2, NEVER_AT_1)])
async def test_elastic_trainers_fail_when_too_few_are_left(backend: Backend, fewest: int, code: str) -> None:
    """All have given up, or so many that the bounds' least can't be there: nobody waits for them for ever."""
    spec = job(code, kind="trainer", elastic=True, instances=2)
    await backend.submit(msgspec.structs.replace(spec, bounds=Bounds(fewest, 4)), token="mine", secrets={})
    status = await ended(backend)
    assert status.phase == "failed"
    assert status.reason.endswith("exited with 78, which says that it can never work as configured")
    assert status.is_hopeless


@pytest.mark.parametrize(("exit_code", "hopeless"), [(EX_DATAERR, True), (1, False)])
async def test_an_elastic_trainer_says_by_its_status_that_the_job_has_failed(
    backend: Backend, tmp_path: Path, exit_code: int, *, hopeless: bool
) -> None:
    """Any that is neither 0 nor 78, whoever else runs or has given up; 65 says that another try is pointless."""
    spec = job(GIVES_UP_AT_1, kind="trainer", elastic=True, instances=2, env={"GO": str(tmp_path / "go")})
    await backend.submit(spec, token="mine", secrets={})
    await reach(backend, "job", gave_up)
    (tmp_path / "code").write_text(str(exit_code))
    (tmp_path / "code").rename(tmp_path / "go")
    status = await ended(backend)
    assert (status.phase, status.reason) == ("failed", f"instance 0 exited with {exit_code}")
    assert status.is_hopeless is hopeless
