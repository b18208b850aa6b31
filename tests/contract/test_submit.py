"""Submitting: get or create, adopt, replace, and ownership."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from support.backends.jobs import WAITS, ended, job, lines, wait_for_line

from edl_runtime.backends.errors import OwnedElsewhereError
from edl_runtime.backends.interface import Backend, Origin, token_owner

FAILS = "import sys; sys.exit(3)"


@pytest.mark.on_pods
async def test_concurrent_submits_create_one_job(backend: Backend) -> None:
    """One creates it and the others adopt it."""
    statuses = await asyncio.gather(*(backend.submit(job(WAITS), token=str(n), secrets={}) for n in range(3)))
    await wait_for_line(backend, "up")
    assert len({status.created_at for status in statuses}) == 1
    assert await lines(backend) == [(0, "up")]


@pytest.mark.on_pods
async def test_a_job_that_succeeded_is_adopted(backend: Backend) -> None:
    """It is not run again; its new owner gets the old outcome."""
    spec = job("print('done')", kind="trainer")
    first = await backend.submit(spec, token="first", secrets={})
    await ended(backend)
    second = await backend.submit(spec, token="second", secrets={})
    assert (second.phase, second.created_at, second.token) == ("succeeded", first.created_at, "second")
    assert not await backend.delete("job", token="first")
    assert await lines(backend) == [(0, "done")]


@pytest.mark.on_pods
@pytest.mark.parametrize("script", [WAITS, "print('up')"], ids=["runs", "has succeeded"])
async def test_a_job_tells_whose_task_has_started_it(backend: Backend, script: str) -> None:
    """As the last submit said, of a job that was adopted, too."""
    spec = job(script, kind="trainer")
    first = Origin(airflow="a", dag_id="nightly", run_id="manual__2026-11-29T00:00:00+00:00", task_id="train")
    assert (await backend.submit(spec, token="first", secrets={}, origin=first)).origin == first
    await wait_for_line(backend, "up")
    if script != WAITS:
        await ended(backend)
    second = msgspec.structs.replace(first, map_index=3, outlives_task=True)
    assert (await backend.submit(spec, token="second", secrets={}, origin=second)).origin == second
    assert (await backend.get("job")).origin == second
    await backend.submit(spec, token="by-hand", secrets={})
    assert (await backend.get("job")).origin is None


@pytest.mark.on_pods
async def test_a_job_that_failed_is_started_again(backend: Backend) -> None:
    """As a new job, without the old one's reason."""
    first = await backend.submit(job(FAILS, kind="trainer"), token="first", secrets={})
    assert (await ended(backend)).phase == "failed"
    second = await backend.submit(job(FAILS, kind="trainer"), token="second", secrets={})
    assert second.created_at > first.created_at
    assert (second.phase, second.reason) == ("running", "")


@pytest.mark.on_pods
async def test_a_changed_spec_replaces_the_job(backend: Backend) -> None:
    """After the old job's instances have ended."""
    await backend.submit(job(WAITS), token="first", secrets={})
    await wait_for_line(backend, "up")
    changed = job("import time; print('changed'); time.sleep(600)")
    await backend.submit(changed, token="second", secrets={})
    await wait_for_line(backend, "changed")
    status = await backend.get("job")
    assert (status.digest, status.token) == (changed.digest, "second")
    assert await lines(backend) == [(0, "changed")]


async def test_a_resized_job_is_adopted_with_its_size(backend: Backend) -> None:
    """`instances` of the spec is only where a job starts."""
    first = await backend.submit(job(WAITS), token="first", secrets={})
    await backend.resize("job", 2)
    second = await backend.submit(job(WAITS), token="second", secrets={})
    assert (second.created_at, second.wanted) == (first.created_at, 2)


@pytest.mark.parametrize(
    ("token", "owner"), [("dag.task/try-1", "dag.task"), ("runs/a/try-1", "runs/a"), ("mine", ""), ("", "")]
)
def test_the_owner_of_a_token_is_what_precedes_the_try(token: str, owner: str) -> None:
    """A token is "OWNER/TRY"."""
    assert token_owner(token) == owner


@pytest.mark.on_pods
async def test_a_later_try_of_the_owner_adopts_the_job(backend: Backend) -> None:
    """As any owner does with a job that has none; with another spec it replaces the job."""
    first = await backend.submit(job(WAITS), token="by-hand", secrets={})
    await wait_for_line(backend, "up")
    for token in ("task/1", "task/2"):
        later = await backend.submit(job(WAITS), token=token, secrets={})
        assert (later.created_at, later.token, (await backend.get("job")).token) == (first.created_at, token, token)
    assert await lines(backend) == [(0, "up")]
    third = await backend.submit(job(WAITS, instances=2), token="task/3", secrets={})
    assert third.created_at > first.created_at


@pytest.mark.parametrize("token", ["other/1", "unowned"])
async def test_a_running_job_of_another_owner_is_not_changed(backend: Backend, token: str) -> None:
    """Neither by the same spec nor by another one; the error names the owner."""
    await backend.submit(job(WAITS), token="task/1", secrets={})
    await wait_for_line(backend, "up")
    for spec in (job(WAITS), job(WAITS, instances=2)):
        with pytest.raises(OwnedElsewhereError, match=r"'job' belongs to 'task'") as caught:
            await backend.submit(spec, token=token, secrets={})
        assert (caught.value.name, caught.value.kind, caught.value.owner) == ("job", "pool", "task")
    status = await backend.get("job")
    assert (status.phase, status.token, await lines(backend)) == ("running", "task/1", [(0, "up")])


@pytest.mark.on_pods
async def test_one_of_several_concurrent_owners_gets_the_job(backend: Backend) -> None:
    """The others get an error."""
    submits = (backend.submit(job(WAITS), token=f"task-{n}/1", secrets={}) for n in range(3))
    outcomes = await asyncio.gather(*submits, return_exceptions=True)
    [won] = [outcome for outcome in outcomes if not isinstance(outcome, OwnedElsewhereError)]
    assert not isinstance(won, BaseException)
    status = await backend.get("job")
    assert (status.phase, status.token) == ("running", won.token)


@pytest.mark.parametrize("code", ["pass", "raise SystemExit(1)"])
async def test_an_ended_job_may_be_replaced_by_any_owner(backend: Backend, code: str) -> None:
    """Once it has succeeded or failed."""
    await backend.submit(job(code, kind="trainer"), token="task/1", secrets={})
    await ended(backend)
    assert (await backend.submit(job(code, kind="trainer"), token="other/1", secrets={})).token == "other/1"
