"""Deleting ends a job for good, and only the one that was meant."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.backends.jobs import IGNORES_SIGTERM, SAYS_GOODBYE, WAITS, ended, job, lines, says

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


async def test_an_ended_job_is_deleted_by_its_token_only(backend: Backend) -> None:
    """The rule of tokens holds for jobs that have ended, too."""
    await backend.submit(job("1/0", kind="trainer"), token="mine", secrets={})
    await ended(backend)
    assert not await backend.delete("job", token="other")
    assert await backend.delete("job", token="mine")
    assert await backend.list() == []


async def test_whose_a_job_was_is_known_as_long_as_its_log(backend: Backend) -> None:
    """Of a job that runs, has been taken over from nobody, or was deleted."""
    with pytest.raises(UnknownJobError):
        await backend.owner("unknown")
    await backend.submit(job(SAYS_GOODBYE), token="by-hand", secrets={})
    await says(backend, "up", instances=1)
    assert await backend.owner("job") == ""
    await backend.submit(job(SAYS_GOODBYE), token="dag/task/1", secrets={})
    assert await backend.owner("job") == "dag/task"
    await backend.delete("job")
    assert await lines(backend)
    assert await backend.owner("job") == "dag/task"


@pytest.mark.on_pods
async def test_a_kill_at_the_same_time_as_the_next_try_never_hits_it(backend: Backend) -> None:
    """Whichever of the two comes first, the next try has a running job afterwards."""
    await backend.submit(job(WAITS), token="try-1", secrets={})
    await asyncio.gather(
        backend.delete("job", token="try-1"),
        backend.submit(job(WAITS), token="try-2", secrets={}),
    )
    status = await backend.get("job")
    assert (status.phase, status.token) == ("running", "try-2")


@pytest.mark.on_pods
async def test_instances_get_their_grace(backend: Backend) -> None:
    """All instances are told to go at once and finish what they do before the delete returns."""
    await backend.submit(job(SAYS_GOODBYE, instances=2), token="mine", secrets={})
    await says(backend, "up", instances=2)
    await backend.delete("job")
    assert await lines(backend) == [(index, text) for index in range(2) for text in ("up", "goodbye")]


async def test_an_instance_that_ignores_sigterm_is_killed_after_its_grace(backend: Backend) -> None:
    """Nobody stays longer than the grace of the spec."""
    await backend.submit(job(IGNORES_SIGTERM, grace_s=0.5), token="mine", secrets={})
    await says(backend, "up")
    started = time.monotonic()
    await backend.delete("job")
    assert time.monotonic() - started >= 0.5


async def test_unknown_jobs_are_said_to_be_unknown(backend: Backend) -> None:
    """Asking for a job that is not there names those that are."""
    await backend.submit(job(WAITS, name="known"), token="mine", secrets={})
    with pytest.raises(UnknownJobError) as caught:
        await backend.get("unknown")
    assert (caught.value.name, list(caught.value.known)) == ("unknown", ["known"])
    with pytest.raises(UnknownJobError, match="known"):
        await backend.resize("unknown", 1)
    with pytest.raises(UnknownJobError, match="known"):
        await anext(backend.logs("../unknown"))
