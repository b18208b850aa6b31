"""Submitting is getting or creating, unless it is somebody else's job that runs."""

from __future__ import annotations

import asyncio

import pytest
from support.backends.jobs import WAITS, ended, job, lines, says

from edl_runtime.backends.errors import OwnedElsewhereError
from edl_runtime.backends.interface import Backend, token_owner

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


@pytest.mark.parametrize(
    ("token", "owner"), [("dag.task/try-1", "dag.task"), ("runs/a/try-1", "runs/a"), ("mine", ""), ("", "")]
)
def test_the_owner_stands_before_the_try(token: str, owner: str) -> None:
    """A token is "OWNER/TRY"; one without an owner is nobody's."""
    assert token_owner(token) == owner


@pytest.mark.on_pods
async def test_a_later_try_of_the_owner_takes_the_job_over(backend: Backend) -> None:
    """The same owner's next try adopts what runs, as anybody does what runs by hand, or replaces another spec."""
    first = await backend.submit(job(WAITS), token="by-hand", secrets={})
    await says(backend, "up")
    for token in ("task/1", "task/2"):
        later = await backend.submit(job(WAITS), token=token, secrets={})
        assert (later.created_at, later.token, (await backend.get("job")).token) == (first.created_at, token, token)
    assert await lines(backend) == [(0, "up")]
    third = await backend.submit(job(WAITS, instances=2), token="task/3", secrets={})
    assert third.created_at > first.created_at


@pytest.mark.parametrize("stranger", ["other/1", "unowned"])
async def test_a_running_job_of_somebody_else_is_left_alone(backend: Backend, stranger: str) -> None:
    """Neither the same spec nor another one takes over a job of another owner; the error says whose it is."""
    await backend.submit(job(WAITS), token="task/1", secrets={})
    await says(backend, "up")
    for spec in (job(WAITS), job(WAITS, instances=2)):
        with pytest.raises(OwnedElsewhereError, match=r"'job' belongs to 'task'") as caught:
            await backend.submit(spec, token=stranger, secrets={})
        assert (caught.value.name, caught.value.kind, caught.value.owner) == ("job", "pool", "task")
    status = await backend.get("job")
    assert (status.phase, status.token, await lines(backend)) == ("running", "task/1", [(0, "up")])


@pytest.mark.on_pods
async def test_of_two_owners_at_once_one_gets_the_name(backend: Backend) -> None:
    """Strangers that come at the same time don't take the job from each other."""
    submits = (backend.submit(job(WAITS), token=f"task-{n}/1", secrets={}) for n in range(3))
    outcomes = await asyncio.gather(*submits, return_exceptions=True)
    [won] = [outcome for outcome in outcomes if not isinstance(outcome, OwnedElsewhereError)]
    assert not isinstance(won, BaseException)
    status = await backend.get("job")
    assert (status.phase, status.token) == ("running", won.token)


@pytest.mark.parametrize("code", ["pass", "raise SystemExit(1)"])
async def test_a_job_that_has_ended_is_anybodys(backend: Backend, code: str) -> None:
    """The name is free once the job has succeeded or failed."""
    await backend.submit(job(code, kind="trainer"), token="task/1", secrets={})
    await ended(backend)
    assert (await backend.submit(job(code, kind="trainer"), token="other/1", secrets={})).token == "other/1"
