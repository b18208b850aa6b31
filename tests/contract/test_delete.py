"""Deleting a job: tokens, grace periods and unknown names."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.backends.jobs import EXITS_GRACEFULLY, GRACE_S, IGNORES_SIGTERM, WAITS, ended, job, lines, wait_for_line

from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import Backend


@pytest.mark.on_pods
async def test_a_stale_token_deletes_nothing(backend: Backend) -> None:
    """A kill of an earlier try leaves the job that a later try has adopted; after a delete there is none to delete."""
    await backend.submit(job(WAITS), token="try-1", secrets={})
    await backend.submit(job(WAITS), token="try-2", secrets={})
    assert not await backend.delete("job", token="try-1")
    assert (await backend.get("job")).phase == "running"
    assert await backend.delete("job", token="try-2")
    assert await backend.list() == []
    assert not await backend.delete("job")


async def test_an_ended_job_is_deleted_by_its_own_token_only(backend: Backend) -> None:
    """The token is checked for ended jobs, too."""
    await backend.submit(job("1/0", kind="trainer"), token="mine", secrets={})
    await ended(backend)
    assert not await backend.delete("job", token="other")
    assert await backend.delete("job", token="mine")
    assert await backend.list() == []


async def test_the_owner_of_a_job_is_known_as_long_as_its_log_is_kept(backend: Backend) -> None:
    """Of a running job with and without an owner, and of a deleted one."""
    with pytest.raises(UnknownJobError):
        await backend.owner("unknown")
    await backend.submit(job(EXITS_GRACEFULLY), token="by-hand", secrets={})
    await wait_for_line(backend, "up", instances=1)
    assert await backend.owner("job") == ""
    await backend.submit(job(EXITS_GRACEFULLY), token="dag/task/1", secrets={})
    assert await backend.owner("job") == "dag/task"
    await backend.delete("job")
    assert await lines(backend)
    assert await backend.owner("job") == "dag/task"


@pytest.mark.on_pods
async def test_a_delete_by_an_earlier_try_never_ends_the_job_of_the_next_try(backend: Backend) -> None:
    """Whichever of the two comes first, the next try has a running job afterwards."""
    await backend.submit(job(WAITS), token="try-1", secrets={})
    await asyncio.gather(
        backend.delete("job", token="try-1"),
        backend.submit(job(WAITS), token="try-2", secrets={}),
    )
    status = await backend.get("job")
    assert (status.phase, status.token) == ("running", "try-2")


@pytest.mark.on_pods
async def test_a_delete_gives_all_instances_their_grace_period(backend: Backend) -> None:
    """All instances get SIGTERM at once and end before the delete returns."""
    await backend.submit(job(EXITS_GRACEFULLY, instances=2, grace_s=GRACE_S), token="mine", secrets={})
    await wait_for_line(backend, "up", instances=2)
    await backend.delete("job")
    assert await lines(backend) == [(index, text) for index in range(2) for text in ("up", "goodbye")]


async def test_an_instance_that_ignores_sigterm_is_killed_after_its_grace_period(backend: Backend) -> None:
    """No instance runs longer than `grace_s` of the spec."""
    await backend.submit(job(IGNORES_SIGTERM, grace_s=0.5), token="mine", secrets={})
    await wait_for_line(backend, "up")
    started = time.monotonic()
    await backend.delete("job")
    assert time.monotonic() - started >= 0.5


async def test_verbs_on_an_unknown_job_raise_an_error_that_lists_the_known_ones(backend: Backend) -> None:
    """For get, resize and logs."""
    await backend.submit(job(WAITS, name="known"), token="mine", secrets={})
    with pytest.raises(UnknownJobError) as caught:
        await backend.get("unknown")
    assert (caught.value.name, list(caught.value.known)) == ("unknown", ["known"])
    with pytest.raises(UnknownJobError, match="known"):
        await backend.resize("unknown", 1)
    with pytest.raises(UnknownJobError, match="known"):
        await anext(backend.logs("../unknown"))
