"""Changing the number of instances while a job runs."""

from __future__ import annotations

import msgspec
import pytest
from support.backends.jobs import SAYS_GOODBYE, WAITS, breaks, ended, eventually, followed, job, lines, reach, says

from edl_runtime.backends.interface import Backend, JobStatus
from edl_runtime.errors import EX_CONFIG, BackendError, SpecError
from edl_runtime.specs import Bounds


def indices(status: JobStatus) -> list[int]:
    return [instance.index for instance in status.instances]


@pytest.mark.on_pods
async def test_a_pool_grows_without_touching_who_is_there(backend: Backend) -> None:
    """New instances come on top; the old ones are not started again."""
    await backend.submit(job(WAITS), token="mine", secrets={})
    await says(backend, "up")
    assert (await backend.resize("job", 3)).wanted == 3
    await says(backend, "up", instances=3)
    assert indices(await backend.get("job")) == [0, 1, 2]
    assert await lines(backend, instance=0) == [(0, "up")]


@pytest.mark.on_pods
async def test_the_highest_index_leaves_first(backend: Backend) -> None:
    """A smaller pool keeps its lowest indices, and who leaves gets the grace to finish."""
    await backend.submit(job(SAYS_GOODBYE, instances=3), token="mine", secrets={})
    await says(backend, "up", instances=3)
    async with followed(backend) as seen:
        await backend.resize("job", 1)
        await reach(backend, "job", lambda status: indices(status) == [0])

        async def all_said() -> bool:
            return seen == [(0, "up"), (1, "up"), (1, "goodbye"), (2, "up"), (2, "goodbye")]

        await eventually(all_said, f"the words of those who leave, of {seen}")


@pytest.mark.on_pods
async def test_an_instance_wanted_again_while_it_leaves_comes_back(backend: Backend) -> None:
    """Shrinking and growing at once ends with the wanted number, the leaver replaced by a new instance."""
    await backend.submit(job(SAYS_GOODBYE, instances=2), token="mine", secrets={})
    await says(backend, "up", instances=2)
    async with followed(backend) as seen:
        await backend.resize("job", 1)
        await backend.resize("job", 2)

        async def it_left() -> bool:
            return (1, "goodbye") in seen

        await eventually(it_left, "the leaver's last word")

        def is_back(status: JobStatus) -> bool:
            return [instance.phase for instance in status.instances] == ["running", "running"]

        await reach(backend, "job", is_back)


@pytest.mark.parametrize("instances", [-1, 5, "two", True])
async def test_a_number_outside_the_bounds_is_refused(backend: Backend, instances: int) -> None:
    """The error says what is allowed, and the job stays as it is."""
    await backend.submit(job(WAITS), token="mine", secrets={})
    with pytest.raises(SpecError, match=r"0, or 1 to 4|a whole number"):
        await backend.resize("job", instances)
    assert (await backend.get("job")).wanted == 1


async def test_a_job_that_has_ended_is_not_resized(backend: Backend) -> None:
    """There is nothing to give instances to."""
    await backend.submit(job("pass", kind="trainer"), token="mine", secrets={})
    await ended(backend)
    with pytest.raises(BackendError, match="submit it again"):
        await backend.resize("job", 2)


async def test_a_trainer_job_succeeds_without_the_instances_it_gave_up(backend: Backend) -> None:
    """Instances that left by a resize don't count for the outcome."""
    code = "import os, time; print('up'); time.sleep(600 * int(os.environ['EDL_INSTANCE']))"
    await backend.submit(job(code, kind="trainer", instances=2), token="mine", secrets={})
    await says(backend, "up", instances=2)
    await backend.resize("job", 1)
    status = await ended(backend)
    assert (status.phase, indices(status)) == ("succeeded", [0])


@pytest.mark.on_pods
async def test_nobody_leaves_while_there_is_one_that_was_given_up(backend: Backend) -> None:
    """As many stay as are asked for, of those that live: else there would be fewer than the bounds' least."""
    spec = job(breaks("0", EX_CONFIG) + WAITS, kind="trainer", elastic=True, instances=4)
    await backend.submit(msgspec.structs.replace(spec, bounds=Bounds(3, 4)), token="mine", secrets={})
    await says(backend, "up", instances=3)
    before = await reach(backend, "job", lambda status: status.attainable == 3)
    await backend.resize("job", 3)
    status = await reach(backend, "job", lambda status: status.has_ended or indices(status) == [1, 2, 3])
    assert (status.phase, status.reason, status.attainable) == ("running", "", 3)
    assert [(one.pod, one.restarts) for one in status.instances] == [(one.pod, 0) for one in before.instances[1:]]
