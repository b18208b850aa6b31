"""Triggers, run by hand."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pkgutil import resolve_name
from typing import Any

import msgspec
import pytest
import stamina
from support.airflow.fakes import POOL, STUDENT, MadeUpSite, job_status

from edl_airflow.hooks.edl import EdlHook, Surroundings
from edl_airflow.pool_wait import GONE, PoolView, PoolWait
from edl_airflow.triggers.job import EdlJobTrigger
from edl_airflow.triggers.wait import EdlWaitTrigger
from edl_airflow.waiting import judge
from edl_airflow.work import LocalPlace, Outcome, Work
from edl_runtime.errors import BackendError, ClusterError, ClusterUnavailableError

WORK = Work(
    conn_id="edl_default",
    place=LocalPlace("/w"),
    token="try-1",
    pool="digits",
    pool_deadline=1e12,
    waits_s=60,
    trainer_job=STUDENT,
)
WAIT = PoolWait(conn_id="edl_default", pool="digits", until=1e12, waits_s=60)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What triggers of jobs log, each with its traceback if it has one."""
    said: list[str] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(self.format(record))

    log = logging.Logger("triggers of jobs")  # noqa: LOG001 - none that others configure
    log.addHandler(Told())
    monkeypatch.setattr(EdlJobTrigger, "log", log)
    return said


def _job_trigger(**changes: Any) -> EdlJobTrigger:
    return EdlJobTrigger(msgspec.to_builtins(msgspec.structs.replace(WORK, **changes)))


async def _looked(site: MadeUpSite) -> None:
    """Wait until somebody has looked at all there is now, and looks again."""
    seen = site.backend.looks
    while site.backend.looks < seen + 2:  # noqa: ASYNC110 (the made-up backend has no events)
        await asyncio.sleep(0.01)


async def _only_event(trigger: Any) -> Outcome:
    events = [event async for event in trigger.run()]
    assert len(events) == 1
    return msgspec.convert(json.loads(json.dumps(events[0].payload)), Outcome)


@pytest.mark.parametrize("trigger", [_job_trigger(), EdlWaitTrigger(msgspec.to_builtins(WAIT))])
def test_a_trigger_comes_back_from_its_serialized_form(trigger: Any) -> None:
    """Another process makes the same trigger of JSON."""
    path, kwargs = trigger.serialize()
    again = resolve_name(path)(**json.loads(json.dumps(kwargs)))
    assert again.serialize() == (path, kwargs)


@pytest.mark.parametrize(
    ("trouble", "passing"),
    [(BackendError("disk is full"), False), (ClusterUnavailableError("https://a:6443", "disk is full"), True)],
)
async def test_trouble_is_an_event(
    site: MadeUpSite, monkeypatch: pytest.MonkeyPatch, trouble: Exception, *, passing: bool
) -> None:
    """A trigger that raised would leave no chance to stop what was started; a retry waits for a cluster."""

    async def get(_: str) -> None:
        raise trouble

    monkeypatch.setattr(site.backend, "get", get)
    outcome = await _only_event(_job_trigger())
    assert (outcome.ended, outcome.permanent, outcome.passing) == ("failed", False, passing)
    assert "disk is full" in outcome.reason


async def test_a_connection_that_is_gone_is_an_event_that_says_so(site: MadeUpSite) -> None:  # noqa: ARG001
    """And one that no retry follows."""
    outcome = await _only_event(_job_trigger(conn_id="elsewhere"))
    assert (outcome.ended, outcome.permanent) == ("failed", True)
    assert "elsewhere" in outcome.reason


async def test_on_kill_works_in_a_fresh_process_and_spares_the_next_try(site: MadeUpSite) -> None:
    """All it needs is in the serialized form, also without a connection; a job with another token goes on."""
    path, kwargs = _job_trigger(conn_id="elsewhere").serialize()
    site.backend.jobs = {"student": job_status("student", "try-2")}
    await resolve_name(path)(**kwargs).on_kill()
    assert "student" in site.backend.jobs
    site.backend.jobs = {"student": job_status("student", "try-1")}
    await resolve_name(path)(**kwargs).on_kill()
    assert site.backend.jobs == {}


async def test_what_on_kill_has_begun_goes_on_when_airflow_waits_no_longer(
    site: MadeUpSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would end the jobs once the cluster is back."""
    back, delete = asyncio.Event(), site.backend.delete

    async def delete_late(name: str, *, token: str) -> bool:
        await back.wait()
        deleted: bool = await delete(name, token=token)
        return deleted

    monkeypatch.setattr(site.backend, "delete", delete_late)
    site.backend.jobs["student"] = job_status("student")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(_job_trigger().on_kill(), timeout=0.05)
    back.set()
    async with asyncio.timeout(60):
        while site.backend.jobs:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_on_kill_has_begun_is_tried_again_until_the_cluster_is_back(
    site: MadeUpSite, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """However often the backend's own patience ends before; that is said once."""
    failures = [ClusterUnavailableError("https://a:6443", "refused")] * 3
    delete = site.backend.delete

    async def flaky(name: str, *, token: str) -> bool:
        if failures:
            raise failures.pop()
        deleted: bool = await delete(name, token=token)
        return deleted

    monkeypatch.setattr(site.backend, "delete", flaky)
    monkeypatch.setattr("edl_airflow.triggers.job.STOP_AGAIN_S", 0.01)
    site.backend.jobs["student"] = job_status("student")
    await _job_trigger().on_kill()
    assert (site.backend.jobs, failures) == ({}, [])
    (line,) = said
    assert "'student'" in line
    assert "a:6443" in line


async def test_jobs_that_can_not_be_stopped_are_named_when_airflow_waits_no_longer(
    site: MadeUpSite, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Nobody is there any more to raise it to; with what is to be done."""
    refused = asyncio.Event()

    async def delete(name: str, *, token: str) -> bool:  # noqa: ARG001
        await refused.wait()
        raise ClusterError(403, "Forbidden", "jobs.batch is forbidden")

    monkeypatch.setattr(site.backend, "delete", delete)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(_job_trigger(pool_job=POOL).on_kill(), timeout=0.05)
    refused.set()
    async with asyncio.timeout(60):
        while not said:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (line,) = said
    assert "'student', 'digits'" in line
    assert "edl stop" in line
    assert "is forbidden" in line


async def test_an_api_server_that_restarts_is_waited_for(site: MadeUpSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is looked up again: a healthy training is not stopped for that."""
    site.backend.jobs = {"student": job_status("student", phase="succeeded")}
    look_up, failures = EdlHook.asurroundings, [ConnectionError("refused"), RuntimeError("502")]

    async def flaky(hook: EdlHook) -> Surroundings:
        if failures:
            raise failures.pop()
        return await look_up(hook)

    monkeypatch.setattr(EdlHook, "asurroundings", flaky)
    with stamina.set_testing(True, attempts=3):
        assert (await _only_event(_job_trigger())).ended == "succeeded"
    assert failures == []


async def test_one_that_does_not_come_back_is_an_event(site: MadeUpSite, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """After some minutes, and a retry may help."""

    async def down(_: EdlHook) -> Surroundings:
        raise ConnectionError("refused")

    monkeypatch.setattr(EdlHook, "asurroundings", down)
    with stamina.set_testing(True, attempts=3):
        outcome = await _only_event(_job_trigger())
    assert (outcome.ended, outcome.permanent) == ("failed", False)
    assert "refused" in outcome.reason


async def test_the_job_is_followed_where_it_was_begun(site: MadeUpSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its connection leads to another folder by now."""
    opened: list[Surroundings] = []

    @asynccontextmanager
    async def note(surroundings: Surroundings) -> AsyncIterator[MadeUpSite]:
        opened.append(surroundings)
        yield site

    monkeypatch.setattr("edl_airflow.triggers.job.open_site", note)
    site.backend.jobs = {"student": job_status("student", phase="succeeded")}
    await _only_event(_job_trigger(place=LocalPlace("/begun/here")))
    assert [surroundings.place for surroundings in opened] == [LocalPlace("/begun/here")]


async def test_a_pool_that_ends_while_it_is_waited_for_ends_the_wait(site: MadeUpSite) -> None:
    """Long before the time is up; one that was never there is waited for."""
    waiting = asyncio.ensure_future(_only_event(EdlWaitTrigger(msgspec.to_builtins(WAIT))))
    await _looked(site)
    site.backend.jobs = {"digits": job_status("digits", kind="pool")}
    await _looked(site)
    assert not waiting.done()
    site.backend.jobs = {}
    assert await waiting == Outcome(ended="gone", name="digits", reason=GONE)


async def test_the_first_event_comes_late_enough(site: MadeUpSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler may still be busy with the half of the task that has deferred."""
    slept, sleep = list[float](), asyncio.sleep

    async def soon(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr("edl_airflow.triggers.base.FIRST_EVENT_AFTER_S", 5.0)
    monkeypatch.setattr(asyncio, "sleep", soon)
    site.backend.jobs = {"student": job_status("student", phase="succeeded")}
    assert (await _only_event(_job_trigger())).ended == "succeeded"
    assert 5.0 in slept


async def test_a_pool_is_waited_for(site: MadeUpSite) -> None:
    """A silent Redis in between is ridden out."""
    site.away = True

    async def events() -> None:
        await _looked(site)
        site.registered, site.away = ["a:1"], False

    outcome, _ = await asyncio.gather(_only_event(EdlWaitTrigger(msgspec.to_builtins(WAIT))), events())
    assert outcome == Outcome(ended="ready", name="digits", teachers=("a:1",))


@pytest.mark.parametrize(
    ("changes", "teachers", "students", "ended"),
    [
        ({"at_least": 2}, ("a",), 0, None),
        ({"at_least": 2}, ("a", "b", "c"), 0, "ready"),
        ({"at_least": 2, "at_most": 2}, ("a", "b", "c"), 0, None),
        ({"at_least": 2, "at_most": 2}, ("a", "b"), 0, "ready"),
        ({"students": 1}, ("a",), 0, None),
        ({"students": 1}, ("a",), 1, "ready"),
        ({"until": 5}, (), 0, "no_teacher"),
        ({"until": 5}, None, 0, "no_teacher"),
        ({"until": 5, "deadline": 5}, (), 0, "timed_out"),
        ({"seen": True}, ("a",), 0, "gone"),
    ],
)
def test_what_a_wait_is_for(
    changes: Mapping[str, Any], teachers: tuple[str, ...] | None, students: int, ended: str | None
) -> None:
    """At least, exactly, with students, or too late; what was seen and is there no more has ended."""
    view = PoolView(teachers=teachers or (), students=students, trouble="" if teachers is not None else "away")
    outcome = judge(msgspec.structs.replace(WAIT, **changes), view, now=5)
    assert (outcome.ended if outcome else None) == ended
