"""Triggers, run by hand."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import msgspec
import pytest
from unit.airflow.made_up import MadeUpSite, job_status

from edl_airflow.pool_wait import PoolWait, judge
from edl_airflow.triggers.job import EdlJobTrigger
from edl_airflow.triggers.teacher_pool import EdlTeacherPoolTrigger
from edl_airflow.work import Outcome, Work
from edl_runtime.errors import BackendError
from edl_runtime.specs import Bounds, JobSpec

STUDENT = JobSpec(name="student", kind="trainer", command=("s",), bounds=Bounds(1, 1), instances=1)
WORK = Work(conn_id="edl_default", token="try-1", pool="digits", pool_deadline=1e12, waits_s=60, student_job=STUDENT)
WAIT = PoolWait(conn_id="edl_default", pool="digits", deadline=1e12, waits_s=60)


def _job_trigger(**changes: Any) -> EdlJobTrigger:
    return EdlJobTrigger(msgspec.to_builtins(msgspec.structs.replace(WORK, **changes)))


async def _only_event(trigger: Any) -> Outcome:
    events = [event async for event in trigger.run()]
    assert len(events) == 1
    return msgspec.convert(json.loads(json.dumps(events[0].payload)), Outcome)


@pytest.mark.parametrize("trigger", [_job_trigger(), EdlTeacherPoolTrigger(msgspec.to_builtins(WAIT))])
def test_a_trigger_comes_back_from_its_serialized_form(trigger: Any) -> None:
    """Another process makes the same trigger of JSON."""
    path, kwargs = trigger.serialize()
    again = resolve_name(path)(**json.loads(json.dumps(kwargs)))
    assert again.serialize() == (path, kwargs)


async def test_a_job_is_followed_to_its_end(site: MadeUpSite) -> None:
    """Teachers come, the student starts, and its result is the event."""

    async def events() -> None:
        site.registered = ["a:1"]
        while "student" not in site.backend.jobs:  # noqa: ASYNC110 (the made-up backend has no events)
            await asyncio.sleep(0.01)
        site.backend.jobs["student"] = job_status("student", phase="succeeded", result={"checkpoint": "c"})

    trigger = _job_trigger()
    outcome, _ = await asyncio.gather(_only_event(trigger), events())
    assert (outcome.ended, outcome.result) == ("succeeded", {"checkpoint": "c"})


async def test_trouble_is_an_event(site: MadeUpSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trigger that raised would leave no chance to stop what was started."""

    async def get(_: str) -> None:
        raise BackendError("disk is full")

    monkeypatch.setattr(site.backend, "get", get)
    outcome = await _only_event(_job_trigger())
    assert (outcome.ended, outcome.permanent) == ("failed", False)
    assert "disk is full" in outcome.reason


async def test_a_connection_that_is_gone_is_an_event_that_says_so(site: MadeUpSite) -> None:  # noqa: ARG001
    """And one that no retry follows."""
    outcome = await _only_event(_job_trigger(conn_id="elsewhere"))
    assert (outcome.ended, outcome.permanent) == ("failed", True)
    assert "elsewhere" in outcome.reason


async def test_on_kill_works_in_a_fresh_process_and_spares_the_next_try(site: MadeUpSite) -> None:
    """All it needs is in the serialized form; a job with another token goes on."""
    path, kwargs = _job_trigger().serialize()
    site.backend.jobs = {"student": job_status("student", "try-2")}
    await resolve_name(path)(**kwargs).on_kill()
    assert "student" in site.backend.jobs
    site.backend.jobs = {"student": job_status("student", "try-1")}
    await resolve_name(path)(**kwargs).on_kill()
    assert site.backend.jobs == {}


async def test_cleanup_and_a_restart_stop_nothing(site: MadeUpSite) -> None:
    """A triggerer that ends leaves the job running, and the next one goes on with it."""
    site.backend.jobs = {"student": job_status("student")}
    trigger = _job_trigger()
    waiting = asyncio.ensure_future(_only_event(trigger))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await trigger.cleanup()
    assert site.backend.deeds == []
    site.backend.jobs["student"] = job_status("student", phase="succeeded")
    assert (await _only_event(_job_trigger())).ended == "succeeded"


async def test_a_triggerer_that_takes_over_does_not_train_again(site: MadeUpSite) -> None:
    """A student that failed while no triggerer looked has failed."""
    site.registered = ["a:1"]
    site.backend.jobs = {"student": job_status("student", phase="failed", reason="exit 1")}
    assert (await _only_event(_job_trigger())).reason == "exit 1"
    assert site.backend.deeds == []


async def test_the_first_event_comes_late_enough(site: MadeUpSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler may still be busy with the half of the task that has deferred."""
    monkeypatch.setattr("edl_airflow.triggers.job.FIRST_EVENT_AFTER_S", 0.3)
    site.backend.jobs = {"student": job_status("student", phase="succeeded")}
    started = time.monotonic()
    await _only_event(_job_trigger())
    assert time.monotonic() - started >= 0.3


async def test_a_pool_is_waited_for(site: MadeUpSite) -> None:
    """A silent Redis in between is ridden out."""
    site.away = True

    async def events() -> None:
        await asyncio.sleep(0.05)
        site.registered, site.away = ["a:1"], False

    outcome, _ = await asyncio.gather(_only_event(EdlTeacherPoolTrigger(msgspec.to_builtins(WAIT))), events())
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
        ({"deadline": 5}, (), 0, "no_teacher"),
        ({"deadline": 5}, None, 0, "no_teacher"),
    ],
)
def test_what_a_wait_is_for(
    changes: Mapping[str, Any], teachers: tuple[str, ...] | None, students: int, ended: str | None
) -> None:
    """At least, exactly, with students, or too late."""
    outcome = judge(msgspec.structs.replace(WAIT, **changes), teachers, students, None, now=5)
    assert (outcome.ended if outcome else None) == ended
