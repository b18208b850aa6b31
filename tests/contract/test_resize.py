"""Resizing a job while it runs."""

from __future__ import annotations

import msgspec
import pytest
from support.backends.jobs import (
    EXITS_GRACEFULLY,
    GRACE_S,
    WAITS,
    ended,
    eventually,
    exits_at,
    followed,
    job,
    lines,
    reach,
    wait_for_line,
)

from edl_runtime.backends.errors import JobReplacedError
from edl_runtime.backends.interface import Backend, JobStatus
from edl_runtime.errors import EX_CONFIG, BackendError, SpecError
from edl_runtime.specs import Bounds


def indices(status: JobStatus) -> list[int]:
    return [instance.index for instance in status.instances]


@pytest.mark.on_pods
async def test_growing_a_pool_keeps_its_instances(backend: Backend) -> None:
    """New instances get the next indices; the old ones are not restarted."""
    await backend.submit(job(WAITS), token="mine", secrets={})
    await wait_for_line(backend, "up")
    assert (await backend.resize("job", 3)).wanted == 3
    await wait_for_line(backend, "up", instances=3)
    assert indices(await backend.get("job")) == [0, 1, 2]
    assert await lines(backend, instance=0) == [(0, "up")]


@pytest.mark.on_pods
async def test_shrinking_removes_the_highest_indices_first(backend: Backend) -> None:
    """The removed instances get their grace period."""
    await backend.submit(job(EXITS_GRACEFULLY, instances=3, grace_s=GRACE_S), token="mine", secrets={})
    await wait_for_line(backend, "up", instances=3)
    async with followed(backend) as seen:
        await backend.resize("job", 1)
        await reach(backend, "job", lambda status: indices(status) == [0])

        async def all_have_ended() -> bool:
            return seen == [(0, "up"), (1, "up"), (1, "goodbye"), (2, "up"), (2, "goodbye")]

        await eventually(all_have_ended, f"the last lines of removed instances, of {seen}")


@pytest.mark.on_pods
async def test_an_instance_that_is_removed_and_added_again_at_once_is_replaced(backend: Backend) -> None:
    """Shrinking and growing at once ends with the wanted number of instances."""
    await backend.submit(job(EXITS_GRACEFULLY, instances=2, grace_s=GRACE_S), token="mine", secrets={})
    await wait_for_line(backend, "up", instances=2)
    async with followed(backend) as seen:
        await backend.resize("job", 1)
        await backend.resize("job", 2)

        async def has_ended() -> bool:
            return (1, "goodbye") in seen

        await eventually(has_ended, "the last line of the removed instance")

        def is_back(status: JobStatus) -> bool:
            return [instance.phase for instance in status.instances] == ["running", "running"]

        await reach(backend, "job", is_back)


@pytest.mark.parametrize("instances", [-1, 5, "two", True])
async def test_a_number_outside_the_bounds_is_refused(backend: Backend, instances: int) -> None:
    """The error names the allowed numbers; the job is not changed."""
    await backend.submit(job(WAITS), token="mine", secrets={})
    with pytest.raises(SpecError, match=r"0, or 1 to 4|a whole number"):
        await backend.resize("job", instances)
    assert (await backend.get("job")).wanted == 1


async def test_a_stale_token_resizes_nothing(backend: Backend) -> None:
    """A resize that was meant for an earlier try does not reach the present one."""
    await backend.submit(job(WAITS), token="try-1", secrets={})
    await backend.submit(job(WAITS), token="try-2", secrets={})
    with pytest.raises(JobReplacedError):
        await backend.resize("job", 2, token="try-1")
    assert (await backend.get("job")).wanted == 1
    assert (await backend.resize("job", 2, token="try-2")).wanted == 2


async def test_resizing_an_ended_job_is_refused(backend: Backend) -> None:
    """The error advises to submit it again."""
    await backend.submit(job("pass", kind="trainer"), token="mine", secrets={})
    await ended(backend)
    with pytest.raises(BackendError, match="submit it again"):
        await backend.resize("job", 2)


async def test_a_trainer_job_succeeds_without_removed_instances(backend: Backend) -> None:
    """Instances that a resize has removed don't count for the outcome."""
    code = "import os, time; print('up'); time.sleep(600 * int(os.environ['EDL_INSTANCE']))"
    await backend.submit(job(code, kind="trainer", instances=2), token="mine", secrets={})
    await wait_for_line(backend, "up", instances=2)
    await backend.resize("job", 1)
    status = await ended(backend)
    assert (status.phase, indices(status)) == ("succeeded", [0])


@pytest.mark.on_pods
async def test_shrinking_removes_given_up_instances_first(backend: Backend) -> None:
    """No running instance is removed, or there would be fewer than the minimum."""
    spec = job(exits_at("0", EX_CONFIG) + WAITS, kind="trainer", elastic=True, instances=4)
    await backend.submit(msgspec.structs.replace(spec, bounds=Bounds(3, 4)), token="mine", secrets={})
    await wait_for_line(backend, "up", instances=3)
    before = await reach(backend, "job", lambda status: status.attainable == 3)
    await backend.resize("job", 3)
    status = await reach(backend, "job", lambda status: status.has_ended or indices(status) == [1, 2, 3])
    assert (status.phase, status.reason, status.attainable) == ("running", "", 3)
    assert [(one.pod, one.restarts) for one in status.instances] == [(one.pod, 0) for one in before.instances[1:]]
