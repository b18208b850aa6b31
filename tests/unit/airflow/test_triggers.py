"""Triggers, run by hand."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pkgutil import resolve_name
from typing import Any

import msgspec
import pytest
import stamina
from airflow.jobs import triggerer_job_runner
from airflow.sdk.exceptions import AirflowNotFoundException
from support.airflow.fakes import POOL, FakeClient, job_status, spec_of

from edl_airflow.hooks.edl import EdlConnection, EdlHook
from edl_airflow.runtime.spec import LocalBackendRef, TaskOutcome
from edl_airflow.triggers import task
from edl_airflow.triggers.task import ENDED_BY_A_PERSON, EdlTaskTrigger
from edl_runtime.backends.errors import ClusterError, ClusterUnavailableError
from edl_runtime.backends.interface import Origin
from edl_runtime.errors import BackendError

WORK = spec_of(pool_job=None, at_least=1)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What triggers of jobs log, each with its traceback if it has one."""
    logged: list[str] = []

    class LogCollector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(self.format(record))

    log = logging.Logger("triggers of jobs")  # noqa: LOG001 - none that others configure
    log.addHandler(LogCollector())
    monkeypatch.setattr(EdlTaskTrigger, "log", log)
    return logged


def _job_trigger(**changes: Any) -> EdlTaskTrigger:
    return EdlTaskTrigger(msgspec.to_builtins(msgspec.structs.replace(WORK, **changes)))


async def _only_event(trigger: Any) -> TaskOutcome:
    events = [event async for event in trigger.run()]
    assert len(events) == 1
    return msgspec.convert(json.loads(json.dumps(events[0].payload)), TaskOutcome)


@pytest.mark.parametrize(
    ("looks_up", "trouble", "ended"),
    [
        (False, BackendError("disk is full"), ("failed", False, False)),
        (False, ClusterUnavailableError("https://a:6443", "disk is full"), ("failed", False, True)),
        (True, AirflowNotFoundException("disk is full"), ("failed", True, False)),
        (True, ConnectionError("disk is full"), ("failed", False, False)),
    ],
    ids=["the backend", "the cluster is away", "the connection is gone", "the API server stays away"],
)
async def test_trouble_is_an_event(
    site: FakeClient, monkeypatch: pytest.MonkeyPatch, looks_up: object, trouble: Exception, ended: tuple[Any, ...]
) -> None:
    """A trigger that raised would leave no chance to stop what was started; the event says whether a retry may help."""

    async def fails(*_: object) -> None:
        raise trouble

    monkeypatch.setattr(*((EdlHook, "aedl_connection") if looks_up else (site.backend, "get")), fails)
    with stamina.set_testing(True, attempts=3):
        outcome = await _only_event(_job_trigger())
    assert (outcome.ended, outcome.permanent, outcome.transient) == ended
    assert "disk is full" in outcome.reason


async def test_on_kill_works_in_a_fresh_process_and_spares_the_next_try(site: FakeClient) -> None:
    """All it needs is in the serialized form, also without a connection; a job with another token goes on."""
    path, kwargs = _job_trigger(conn_id="elsewhere").serialize()
    site.backend.jobs = {"student": job_status("student", "try-2")}
    await resolve_name(path)(**kwargs).on_kill()
    assert "student" in site.backend.jobs
    site.backend.jobs = {"student": job_status("student", "try-1")}
    await resolve_name(path)(**kwargs).on_kill()
    assert site.backend.jobs == {}


@pytest.mark.parametrize(
    ("by", "left"), [(ENDED_BY_A_PERSON, {}), ("EOF - shutting down", {"student"}), (None, {"student"})]
)
async def test_what_a_person_has_ended_is_stopped_though_nobody_calls_on_kill(
    site: FakeClient, by: str | None, left: set[str]
) -> None:
    """Airflow forgets to where it cancels a trigger once more meanwhile; one that only shuts down stops nothing.

    What follows the job may raise another cancellation, without Airflow's message.
    """
    assert ENDED_BY_A_PERSON == triggerer_job_runner._USER_ACTION_CANCEL_MSG
    site.backend.jobs = {"student": job_status("student", "try-1")}
    followed = asyncio.Event()

    class Trigger(EdlTaskTrigger):
        async def outcome(self) -> TaskOutcome:
            followed.set()
            try:
                return await asyncio.Future()
            except asyncio.CancelledError:
                raise asyncio.CancelledError from None

    running = asyncio.create_task(_only_event(Trigger(msgspec.to_builtins(WORK))))
    await followed.wait()
    running.cancel(by)
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await running
    assert cancelled.value.args == ((by,) if by else ())
    await asyncio.gather(*task._stopping)
    assert site.backend.jobs.keys() == set(left)


async def test_the_teachers_are_stopped_once_airflow_has_the_event_that_the_student_has_ended(
    site: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nobody takes the event, as while the DAG is paused; and not before, nor because Airflow is away."""
    answers: list[str | None] = ["scheduled", "deferred", None]

    def states(origins: list[Origin]) -> dict[Origin, str]:
        assert "digits" in site.backend.jobs
        if not (answer := answers.pop()):
            raise ConnectionError
        return dict.fromkeys(origins, answer)

    monkeypatch.setattr("edl_airflow.triggers.task.task_states", states)
    monkeypatch.setattr("edl_airflow.triggers.task.STORED_AGAIN_S", 0.0)
    origin = Origin(airflow="a", dag_id="nightly", run_id="manual__1", task_id="distill")
    site.backend.jobs = {
        "student": job_status("student", phase="succeeded", result={"checkpoint": "c"}),
        "digits": job_status("digits", kind="pool"),
    }
    outcome = await _only_event(_job_trigger(pool_job=POOL, origin=origin))
    assert (outcome.ended, outcome.result) == ("succeeded", {"checkpoint": "c"})
    await asyncio.gather(*task._stopping)
    assert site.backend.jobs.keys() == {"student"}
    assert answers == []


async def test_what_on_kill_has_begun_is_tried_again_until_the_cluster_is_back(
    site: FakeClient, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """However often the backend's own patience ends before; that is logged once."""
    failures = [ClusterUnavailableError("https://a:6443", "refused")] * 3
    delete = site.backend.delete

    async def flaky(name: str, *, token: str) -> bool:
        if failures:
            raise failures.pop()
        deleted: bool = await delete(name, token=token)
        return deleted

    monkeypatch.setattr(site.backend, "delete", flaky)
    monkeypatch.setattr("edl_airflow.triggers.task.STOP_AGAIN_S", 0.01)
    site.backend.jobs["student"] = job_status("student")
    await _job_trigger().on_kill()
    assert (site.backend.jobs, failures) == ({}, [])
    (line,) = logged
    assert "'student'" in line
    assert "a:6443" in line


async def test_what_on_kill_has_begun_goes_on_and_names_jobs_that_can_not_be_stopped_when_airflow_waits_no_longer(
    site: FakeClient, monkeypatch: pytest.MonkeyPatch, logged: list[str]
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
        while not logged:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (line,) = logged
    assert "'student', 'digits'" in line
    assert "edl stop" in line
    assert "is forbidden" in line


async def test_an_api_server_that_restarts_is_waited_for(site: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is looked up again: a healthy training is not stopped for that."""
    site.backend.jobs = {"student": job_status("student", phase="succeeded")}
    look_up, failures = EdlHook.aedl_connection, [ConnectionError("refused"), RuntimeError("502")]

    async def flaky(hook: EdlHook) -> EdlConnection:
        if failures:
            raise failures.pop()
        return await look_up(hook)

    monkeypatch.setattr(EdlHook, "aedl_connection", flaky)
    with stamina.set_testing(True, attempts=3):
        assert (await _only_event(_job_trigger())).ended == "succeeded"
    assert failures == []


async def test_the_job_is_followed_where_it_was_begun(site: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its connection leads to another folder by now."""
    opened: list[EdlConnection] = []

    @asynccontextmanager
    async def note(edl_connection: EdlConnection) -> AsyncIterator[FakeClient]:
        opened.append(edl_connection)
        yield site

    monkeypatch.setattr("edl_airflow.triggers.task.open_client", note)
    site.backend.jobs = {"student": job_status("student", phase="succeeded")}
    await _only_event(_job_trigger(place=LocalBackendRef("/begun/here")))
    assert [edl_connection.place for edl_connection in opened] == [LocalBackendRef("/begun/here")]


async def test_the_first_event_comes_late_enough(site: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
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
