"""Submitting is getting or creating."""

from __future__ import annotations

import asyncio

import pytest
from support.backends.jobs import WAITS, ended, job, lines, says

from edl_runtime.backends.base import Backend

FAILS = "import sys; sys.exit(3)"


@pytest.mark.on_pods
async def test_submits_at_once_make_one_job(backend: Backend) -> None:
    """Of several submits at the same time one creates the job and the others adopt it."""
    statuses = await asyncio.gather(*(backend.submit(job(WAITS), token=str(n), secrets={}) for n in range(3)))
    await says(backend, "up")
    assert len({status.created_at for status in statuses}) == 1
    assert await lines(backend) == [(0, "up")]


@pytest.mark.on_pods
async def test_a_job_that_succeeded_is_adopted(backend: Backend) -> None:
    """What is done is not done again; its new owner gets the old outcome."""
    spec = job("print('done')", kind="trainer")
    first = await backend.submit(spec, token="first", secrets={})
    await ended(backend)
    second = await backend.submit(spec, token="second", secrets={})
    assert (second.phase, second.created_at, second.token) == ("succeeded", first.created_at, "second")
    assert not await backend.delete("job", token="first")
    assert await lines(backend) == [(0, "done")]


@pytest.mark.on_pods
async def test_a_job_that_failed_is_started_anew(backend: Backend) -> None:
    """The same spec after a failure is a new job, and the old one's reason is gone."""
    first = await backend.submit(job(FAILS, kind="trainer"), token="first", secrets={})
    assert (await ended(backend)).phase == "failed"
    second = await backend.submit(job(FAILS, kind="trainer"), token="second", secrets={})
    assert second.created_at > first.created_at
    assert (second.phase, second.reason) == ("running", "")


@pytest.mark.on_pods
async def test_another_spec_stops_the_old_job_first(backend: Backend) -> None:
    """A changed spec of the same name replaces the job, after the old one's instances were told to go."""
    await backend.submit(job(WAITS), token="first", secrets={})
    await says(backend, "up")
    changed = job("import time; print('changed'); time.sleep(600)")
    await backend.submit(changed, token="second", secrets={})
    await says(backend, "changed")
    status = await backend.get("job")
    assert (status.digest, status.token) == (changed.digest, "second")
    assert await lines(backend) == [(0, "changed")]


async def test_a_job_resized_since_is_adopted_as_it_is(backend: Backend) -> None:
    """The spec's number is where a job starts: a resize is no reason to start it anew."""
    first = await backend.submit(job(WAITS), token="first", secrets={})
    await backend.resize("job", 2)
    second = await backend.submit(job(WAITS), token="second", secrets={})
    assert (second.created_at, second.wanted) == (first.created_at, 2)
