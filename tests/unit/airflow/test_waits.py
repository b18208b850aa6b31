"""Waits for pools, jobs and checkpoints: sensors, resizes, and the events that checkpoints make."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pkgutil import resolve_name
from typing import Any

import msgspec
import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException
from support.airflow.asset_watcher import AssetStates, watching
from support.airflow.fakes import (
    FakeClient,
    deferred_by,
    event_of,
    failed_status,
    job_status,
    rendered,
    saved,
    spec_of,
)

from edl_airflow.failures import TargetEndedError
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.runtime.spec import TaskOutcome, TrainingStatus
from edl_airflow.sensors.checkpoint import CheckpointCondition, CheckpointObservation, EdlCheckpointSensor, Threshold
from edl_airflow.sensors.job import EdlJobSensor, JobCondition, JobObservation
from edl_airflow.sensors.teacher_pool import POOL_STOPPED_REASON, EdlTeacherPoolSensor, PoolCondition, PoolObservation
from edl_airflow.triggers.checkpoint import EdlCheckpointTrigger
from edl_airflow.triggers.task import EdlConditionTrigger, EdlTaskTrigger
from edl_airflow.waits import evaluate
from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import InstanceStatus, JobStatus
from edl_runtime.errors import BackendError, SpecError

RUNS = JobCondition(conn_id="edl_default", job="student", until=10.0, wait_timeout_s=5, began_at=50.0)
SUCCEEDS = msgspec.structs.replace(RUNS, phase="succeeded")
POOL = PoolCondition(conn_id="edl_default", teacher_pool="digits", until=1e12, wait_timeout_s=60)
SAVED = CheckpointCondition(conn_id="edl_default", stream="nightly/train", until=10.0, wait_timeout_s=5, began_at=50.0)
JOB, DONE = job_status("student"), job_status("student", phase="succeeded")
PLAIN = job_status("student", elastic=False)
TWO = TrainingStatus(members=(0, 1))
STOPPED = TrainingStatus(members=(0,), ended="stopped", heard_at=60.0)
FAILED = TrainingStatus(ended="failed", reason="a script failed", heard_at=60.0)
BEFORE_IT_BEGAN = {"heard_at": 40.0}


LEFT = msgspec.structs.replace(JOB, phase="pending", wanted=0)
LEAVING = msgspec.structs.replace(LEFT, instances=(InstanceStatus(index=0, phase="running", started_at=1.0),))
NOBODY = msgspec.structs.replace(RUNS, at_least=0, at_most=0, seen=True)
RESUMED = msgspec.structs.replace(JOB, instances=(InstanceStatus(index=0, phase="running", started_at=5.0),))


def ended(wait: Any, view: Any, now: float = 5) -> str | None:
    """How a wait has ended, None if it has not."""
    outcome = evaluate(wait, view, now)
    return outcome.ended if outcome else None


@pytest.mark.parametrize(
    ("wait", "job", "training", "how"),
    [
        (RUNS, None, None, None),
        (RUNS, JOB, None, None),
        (RUNS, JOB, TrainingStatus(), None),
        (RUNS, JOB, TWO, "ready"),
        (msgspec.structs.replace(RUNS, at_least=3), JOB, TWO, None),
        (msgspec.structs.replace(RUNS, at_least=1, at_most=1), JOB, TWO, None),
        (RUNS, None, TWO, None),  # of an earlier job of that name
        (RUNS, msgspec.structs.replace(JOB, wanted=0), TWO, None),  # as it was before it was suspended
        (RUNS, RESUMED, msgspec.structs.replace(TWO, heard_at=4.0), None),  # its agents have yet to come
        (RUNS, RESUMED, msgspec.structs.replace(TWO, heard_at=5.5), "ready"),
        (NOBODY, LEAVING, msgspec.structs.replace(TWO, members=(0,)), None),
        (NOBODY, None, None, "gone"),
        (RUNS, PLAIN, None, "impossible"),
        (SUCCEEDS, PLAIN, None, None),
        (SUCCEEDS, msgspec.structs.replace(PLAIN, phase="succeeded"), None, "ready"),
        (RUNS, DONE, TWO, "gone"),
        (RUNS, failed_status("student", 1), TWO, "failed"),
        (msgspec.structs.replace(RUNS, seen=True), None, TWO, "gone"),
        (SUCCEEDS, JOB, TWO, None),
        (SUCCEEDS, DONE, TWO, "ready"),
        (SUCCEEDS, None, STOPPED, "ready"),  # its task has removed it
        (SUCCEEDS, None, msgspec.structs.replace(STOPPED, **BEFORE_IT_BEGAN), "ready"),
        (SUCCEEDS, None, FAILED, "failed"),
        (SUCCEEDS, None, msgspec.structs.replace(FAILED, **BEFORE_IT_BEGAN), None),
        (RUNS, None, STOPPED, "gone"),
        (RUNS, None, FAILED, "failed"),
        (RUNS, None, msgspec.structs.replace(STOPPED, **BEFORE_IT_BEGAN), None),
        (RUNS, None, msgspec.structs.replace(FAILED, **BEFORE_IT_BEGAN), None),
        (RUNS, JOB, FAILED, None),  # an earlier try's; this one's agents have yet to come
        (SUCCEEDS, failed_status("student", 1), None, "failed"),
        (msgspec.structs.replace(SUCCEEDS, seen=True), None, TWO, "gone"),
        (msgspec.structs.replace(SUCCEEDS, until=5.0), JOB, TWO, "not_yet"),
        (msgspec.structs.replace(SUCCEEDS, until=5.0, deadline=5.0), JOB, TWO, "timed_out"),
    ],
)
def test_what_a_wait_for_a_job_is_for(
    wait: JobCondition, job: JobStatus | None, training: TrainingStatus | None, how: str | None
) -> None:
    """So many that train together, or success; what can't come any more ends it."""
    assert ended(wait, JobObservation(job=job, training=training)) == how


@pytest.mark.parametrize(
    ("changes", "teachers", "students", "how"),
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
def test_what_a_wait_for_a_pool_is_for(
    changes: Mapping[str, Any], teachers: tuple[str, ...] | None, students: int, how: str | None
) -> None:
    """At least, exactly, with students, or too late; what was seen and is there no more has ended."""
    view = PoolObservation(teachers=teachers or (), students=students, trouble="" if teachers is not None else "away")
    assert ended(msgspec.structs.replace(POOL, **changes), view) == how


def test_a_wait_for_a_pool_that_nobody_has_or_that_loads_says_so() -> None:
    """While it lasts, and in the end."""
    nobody = PoolObservation(other_pools="namespace 'default' has mnist")
    assert POOL.missing(nobody) == "no pool of that name is known, and namespace 'default' has mnist"
    assert ended(msgspec.structs.replace(POOL, until=5), nobody) == "no_pool"
    loads = POOL.missing(PoolObservation(job=job_status("digits", kind="pool")))
    assert "; `edl logs digits` shows whether others still load; a longer" in loads


@pytest.mark.parametrize(
    ("wait", "view", "lack"),
    [
        (RUNS, JobObservation(), "there is no such job"),
        (RUNS, JobObservation(job=JOB), "it trains with 0 instances, required: 1 or more"),
        (
            msgspec.structs.replace(RUNS, at_most=1),
            JobObservation(job=JOB),
            "it trains with 0 instances, required: 1",
        ),
        (RUNS, JobObservation(trouble="away"), "Redis does not answer"),
        (NOBODY, JobObservation(job=LEAVING), "it waits for 1 instance to leave"),
    ],
)
def test_what_a_wait_for_a_job_lacks_is_in_the_error(wait: JobCondition, view: JobObservation, lack: str) -> None:
    """When its time is up."""
    outcome = evaluate(wait, view, now=10)
    assert outcome
    assert (outcome.ended, outcome.reason) == ("not_yet", lack)


def test_a_job_or_pool_is_suspended_when_nobody_is_left() -> None:
    """Though the last that trained are known still, or Redis is away."""
    for view in (
        JobObservation(job=LEFT, training=TWO),
        JobObservation(job=LEFT),
        JobObservation(job=LEFT, trouble="away"),
    ):
        outcome = evaluate(NOBODY, view, 5)
        assert outcome
        assert (outcome.ended, outcome.running_job()) == ("ready", {"job": "student", "instances": 0})
    no_teachers = msgspec.structs.replace(POOL, at_least=0, at_most=0, seen=True)
    pool = job_status("digits", kind="pool", phase="pending", wanted=0)
    assert ended(no_teachers, PoolObservation(job=pool, teachers=("a:1",))) is None
    assert ended(no_teachers, PoolObservation(job=pool)) == "ready"


@pytest.mark.parametrize(
    ("text", "metrics", "holds"),
    [
        ("accuracy>=0.9", {"accuracy": 0.9}, True),
        (" accuracy >= 9e-1 ", {"accuracy": 0.89}, False),
        ("loss<0.1", {"loss": 0.1}, False),
        ("loss <= 0.1", {"loss": 0.1}, True),
        ("val/f1>-1", {"val/f1": 0.0}, True),
        ("accuracy>=0.9", {"loss": 1.0}, False),
        ("accuracy<0.9", {"accuracy": float("nan")}, False),
    ],
)
def test_a_metric_has_a_bound(text: str, metrics: dict[str, float], holds: bool) -> None:  # noqa: FBT001
    """One that is missing has not reached it."""
    assert Threshold.parse("metric", text).holds(metrics) is holds


@pytest.mark.parametrize(
    "text", ["accuracy", "accuracy=0.9", ">=0.9", "accuracy>=", "accuracy>=high", "a b>=1", "", 0.9, None]
)
def test_what_is_no_bound_is_refused(text: Any) -> None:
    """The error names the field; what upstream tasks return may be no text."""
    with pytest.raises(SpecError, match="metric"):
        Threshold.parse("metric", text)


BETTER = Threshold.parse("metric", "accuracy>=0.5")


@pytest.mark.parametrize(
    ("changes", "ended"),
    [
        ({}, 3),
        ({"step": 2}, 3),
        ({"step": 4}, None),
        ({"epoch": 2}, 2),
        ({"epoch": 3}, None),
        ({"metric": BETTER}, 1),
        ({"metric": BETTER, "step": 2}, None),
        ({"max_age": 10.0}, 3),
        ({"max_age": 1.0}, None),
        ({"job": "other"}, 2),
        ({"job": "third"}, None),
    ],
)
def test_what_a_wait_for_a_checkpoint_is_for(changes: dict[str, Any], ended: int | None) -> None:
    """All that is asked for has to be true of one; the newest such one counts."""
    found = saved(1, metrics={"accuracy": 0.6}), saved(2, epoch=2, job="other"), saved(3, metrics={"accuracy": 0.4})
    view = CheckpointObservation(saved=found, last_id="3", at=105.0, job=JOB)
    outcome = evaluate(msgspec.structs.replace(SAVED, **changes), view, now=5)
    assert (outcome.checkpoint["step"] if outcome and outcome.checkpoint else None) == ended


def test_a_job_that_has_ended_without_such_a_checkpoint_ends_the_wait() -> None:
    """The error names what it has not reached; while Redis is away nothing is known."""
    wait = msgspec.structs.replace(SAVED, job="student", step=9, metric=BETTER)
    outcome = evaluate(wait, CheckpointObservation(job=DONE, saved=(saved(3),)), now=5)
    assert outcome
    assert (outcome.ended, outcome.reason) == (
        "gone",
        "the job has ended, and no checkpoint of it has step 9 or later, accuracy >= 0.5",
    )
    assert ended(wait, CheckpointObservation()) is None
    assert ended(wait.after(CheckpointObservation(job=JOB)), CheckpointObservation()) == "gone"
    assert ended(wait, CheckpointObservation(job=DONE, trouble="away")) is None
    assert ended(wait, CheckpointObservation(job=failed_status("student", 1))) == "failed"


@pytest.mark.parametrize(
    ("job", "training", "how"),
    [
        (None, STOPPED, "gone"),
        (None, FAILED, "failed"),
        (None, msgspec.structs.replace(STOPPED, **BEFORE_IT_BEGAN), None),
        (None, msgspec.structs.replace(FAILED, **BEFORE_IT_BEGAN), None),
        (None, TWO, None),
        (JOB, FAILED, None),
    ],
)
async def test_a_job_that_was_removed_is_not_waited_for_to_write_a_checkpoint(
    site: FakeClient, job: JobStatus | None, training: TrainingStatus, how: str | None
) -> None:
    """What its agents have left says how it ended, unless that was before this run began."""
    site.backend.jobs, site.trainings = {"student": job} if job else {}, {"student": training}
    site.saved = [saved(3)]
    wait = msgspec.structs.replace(SAVED, job="student", step=9)
    view = await wait.observe(site, time.time())  # type: ignore[arg-type]
    assert ended(wait, view) == how
    assert ended(msgspec.structs.replace(wait, step=3), view) == "ready"


async def test_what_can_not_be_read_of_a_stream_is_passed_by(site: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at once, and hides nothing."""
    site.saved = [saved(1), None]
    view = await SAVED.observe(site, time.time())  # type: ignore[arg-type]
    assert (view.saved, view.last_id) == ((saved(1),), "2")
    states = AssetStates(monkeypatch)
    async with watching(EdlCheckpointTrigger(stream="nightly/train")) as watched:
        await site.followed.wait()
        site.saved += [None, saved(3)]
        assert [event["step"] for event in await watched.fired(1)] == [3]
    assert list(states.values.values()) == ["2"]


async def test_each_look_goes_on_where_the_last_one_was(site: FakeClient) -> None:
    """A stream may be long."""
    site.saved = [saved(1), saved(2)]
    wait = SAVED.after(await SAVED.observe(site, time.time()))  # type: ignore[arg-type]
    site.saved.append(saved(3))
    assert (await wait.observe(site, time.time())).saved == (saved(3),)  # type: ignore[arg-type]
    site.away = True
    away = await wait.observe(site, time.time())  # type: ignore[arg-type]
    assert "nowhere:1" in away.trouble
    assert wait.after(away) == wait


def test_the_sensor_of_a_job(context: Any, site: FakeClient) -> None:
    """It looks once and defers; at last it returns how many train."""
    given: dict[str, Any] = {"task_id": "wait", "job": "{{ 'student' }}", "at_least": "{{ params.high }}"}
    sensor = rendered(EdlJobSensor(**given, deferrable=True), context)
    site.backend.jobs, site.trainings = {"student": JOB}, {"student": TWO}
    deferred = deferred_by(sensor, context)
    assert deferred.trigger.serialize()[1]["condition"]["at_least"] == 3
    site.trainings["student"] = TrainingStatus(members=(2, 0, 1))
    assert sensor.execute(context) == {"job": "student", "instances": 3}
    late = event_of(deferred, TaskOutcome(ended="not_yet", name="student", reason="2 train"))
    with pytest.raises(AirflowSensorTimeout, match="2 train"):
        EdlJobSensor(task_id="wait", job="student").execute_complete(context, late)


def test_a_job_without_agents_is_not_waited_for(context: Any, site: FakeClient) -> None:
    """A student that is one process will never be seen to train; the error says what would."""
    site.backend.jobs = {"student": PLAIN}
    with pytest.raises(AirflowFailException, match=r"'student': it is not a job of elastic trainers.*`students`"):
        EdlJobSensor(task_id="wait", job="student").execute(context)
    with pytest.raises(AirflowFailException, match="'student': it is not a job of elastic trainers"):
        _grow(instances=1).execute(context)
    assert _grow(instances=1, wait=False).execute(context) == {"job": "student", "instances": 0}


def test_the_sensor_of_a_checkpoint(context: Any, site: FakeClient) -> None:
    """It takes templates and returns what it has found."""
    given: dict[str, Any] = {"task_id": "wait", "stream": "{{ 'nightly' }}/train", "step": "{{ params.high }}"}
    given |= {"metric": "accuracy>={{ 0.5 }}", "max_age": timedelta(days=400_000)}
    sensor = rendered(EdlCheckpointSensor(**given, deferrable=True), context)
    site.saved = [saved(2, metrics={"accuracy": 0.6}), saved(3)]
    deferred = deferred_by(sensor, context)
    wait = deferred.trigger.serialize()[1]["condition"]
    assert (wait["stream"], wait["step"], wait["last_id"]) == ("nightly/train", 3, "2")
    site.saved.append(saved(4, metrics={"accuracy": 0.6}))
    assert sensor.execute(context) == saved(4, metrics={"accuracy": 0.6})
    event = event_of(deferred, TaskOutcome(ended="ready", name="nightly/train", checkpoint=saved(4)))
    fresh = EdlCheckpointSensor(task_id="wait", stream="nightly/train")
    assert fresh.execute_complete(context, json.loads(json.dumps(event))) == saved(4)


def _grow(**changes: Any) -> EdlResizeOperator:
    return EdlResizeOperator(**{"task_id": "grow", "job": "student", "instances": 2, "deferrable": True, **changes})


def test_a_job_is_resized_until_so_many_train_together(context: Any, site: FakeClient) -> None:
    """Neither more nor fewer; the link leads to the job's log."""
    site.backend.jobs, site.trainings = {"student": JOB}, {"student": TrainingStatus(members=(0, 1, 2))}
    deferred = deferred_by(_grow(), context)
    assert ("resize to 2", "student") in site.backend.calls
    assert context["ti"].xcoms == {"_link_ResizedLink": "/edl/?conn=edl_default&job=student"}
    site.trainings["student"] = TWO
    assert _grow().execute(context) == {"job": "student", "instances": 2}
    gone = event_of(deferred, TaskOutcome(ended="gone", name="student", reason="it was stopped"))
    with pytest.raises(AirflowSkipException, match="'student' has ended"):
        _grow().execute_complete(context, gone)


@pytest.mark.parametrize(
    ("missing", "named"),
    [("job", r"teacher_pool, job: got \(None, None\)"), ("instances", r"instances, windows: got \(None, None\)")],
)
def test_an_upstream_task_that_returns_nothing_leaves_nothing_to_resize(
    missing: str, named: str, context: Any, site: FakeClient
) -> None:
    """Its output is known only when the task runs; the error then says what was to be given."""
    operator = _grow()
    setattr(operator, missing, None)
    with pytest.raises(AirflowFailException, match=named):
        operator.execute(context)
    assert site.backend.calls == []


def test_a_job_that_has_ended_is_not_resized(context: Any, site: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is skipped; but not where the job has failed, or never was."""

    async def refuse(name: str, instances: int) -> None:  # noqa: ARG001
        raise UnknownJobError(name) if name not in site.backend.jobs else BackendError(f"{name!r} has ended")

    monkeypatch.setattr(site.backend, "resize", refuse)
    site.backend.jobs = {"student": DONE}
    with pytest.raises(AirflowSkipException, match="trained all"):
        _grow().execute(context)
    site.backend.jobs = {"student": failed_status("student", 1)}
    with pytest.raises(BackendError, match="has ended"):
        _grow().execute(context)
    site.backend.jobs, site.backend.ended = {}, {"student"}
    with pytest.raises(AirflowSkipException, match="was stopped"):
        _grow().execute(context)
    with pytest.raises(UnknownJobError):
        _grow(job="stodent").execute(context)


async def test_a_silent_redis_makes_no_event_and_no_end(site: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that ended would never come back."""
    monkeypatch.setattr("edl_airflow.triggers.checkpoint.RETRY_EVERY_S", 0.01)
    site.away = True
    AssetStates(monkeypatch)
    async with watching(EdlCheckpointTrigger(stream="nightly/train")) as watched:
        while site.refused < 3:  # noqa: ASYNC110 (the made-up site has no events)
            await asyncio.sleep(0.01)
        site.away = False
        await site.followed.wait()
        site.saved = [saved(1)]
        assert [event["checkpoint"] for event in await watched.fired(1)] == ["/c/1"]


def test_a_silent_redis_is_waited_for(context: Any, site: FakeClient) -> None:
    """By all in the triggerer; a new size is recorded at once."""
    site.backend.jobs, site.away = {"digits": job_status("digits", kind="pool")}, True
    deferred_by(_grow(teacher_pool="digits", job=None), context)
    assert ("resize to 2", "digits") in site.backend.calls
    deferred_by(EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits", deferrable=True), context)
    deferred_by(EdlJobSensor(task_id="wait", job="student", deferrable=True), context)
    deferred_by(EdlCheckpointSensor(task_id="wait", stream="nightly/train", deferrable=True), context)
    assert not EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits").poke(context).is_done


def test_waits_heed_the_tasks_time(context: Any, site: FakeClient) -> None:
    """Airflow forgets `execution_timeout` on deferral, so the wait carries it."""
    site.backend.jobs = {"digits": job_status("digits", kind="pool")}
    sensor = EdlTeacherPoolSensor(
        task_id="wait", teacher_pool="digits", deferrable=True, execution_timeout=timedelta(seconds=9)
    )
    for operator in (sensor, _grow(teacher_pool="digits", job=None, execution_timeout=timedelta(seconds=9))):
        before = time.time()
        wait = deferred_by(operator, context).trigger.serialize()[1]["condition"]
        assert before <= wait["deadline"] - 9 <= time.time()


@pytest.mark.parametrize("deferrable", [False, True])
@pytest.mark.parametrize("lenient", [{}, {"soft_fail": True}, {"never_fail": True}])
def test_what_can_not_come_any_more_fails_the_sensor_or_skips_it(
    context: Any,
    site: FakeClient,
    lenient: dict[str, bool],
    deferrable: bool,  # noqa: FBT001
) -> None:
    """At the first look, at a later one, and in the triggerer."""
    given: dict[str, Any] = {"task_id": "wait", "teacher_pool": "digits", "poke_interval": 0.01, "timeout": 100}
    sensor = EdlTeacherPoolSensor(**given, deferrable=deferrable, **lenient)
    site.backend.jobs = {"digits": failed_status("digits", 78, "no such model")}
    with pytest.raises(AirflowSkipException if lenient else AirflowFailException, match=r"no such model|_fail"):
        sensor.execute(context)
    site.backend.jobs = {"digits": job_status("digits", kind="pool")}
    if deferrable:
        ended = TaskOutcome(ended="gone", name="digits", reason="it is no more")
        event = {"event": event_of(deferred_by(sensor, context), ended)}
        go_on = partial(sensor.resume_execution, "execute_complete", event, context)
    else:
        site.backend.forget_after("digits", looks=2)
        go_on = partial(sensor.execute, context)
    with pytest.raises(AirflowSkipException if lenient else TargetEndedError, match=r"'digits' has ended|_fail"):
        go_on()


def test_the_sensor_of_a_pool(context: Any, site: FakeClient) -> None:
    """Then it needs no worker until the pool is there, or its time is up."""
    sensor = EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits", at_least="{{ params.high }}", deferrable=True)
    deferred = deferred_by(rendered(sensor, context), context)
    assert deferred.trigger.serialize()[1]["condition"]["at_least"] == 3
    site.registered = ["a", "b", "c"]
    assert sensor.execute(context) == {"pool": "digits", "teachers": ["a", "b", "c"]}
    late = event_of(deferred, TaskOutcome(ended="no_teacher", name="digits"))
    with pytest.raises(AirflowSensorTimeout, match="digits"):
        EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits").execute_complete(context, late)


async def test_a_pool_that_ends_while_it_is_waited_for_ends_the_wait(site: FakeClient) -> None:
    """Long before the time is up; one that was never there is waited for, and so is a Redis that is away."""
    events: Any = EdlConditionTrigger.of(POOL).run()
    waiting = asyncio.ensure_future(anext(events))
    for jobs in ({}, {"digits": job_status("digits", kind="pool")}):
        site.backend.jobs, site.away, seen = jobs, not jobs, site.backend.gets
        while site.backend.gets < seen + 2:  # noqa: ASYNC110 (the fake backend has no events)
            await asyncio.sleep(0.01)
        assert not waiting.done()
    site.backend.jobs = {}
    outcome = msgspec.convert((await waiting).payload, TaskOutcome, strict=False)
    assert outcome == TaskOutcome(ended="gone", name="digits", reason=POOL_STOPPED_REASON)


@pytest.mark.parametrize(
    "trigger",
    [
        *(EdlConditionTrigger.of(wait) for wait in (POOL, RUNS, SAVED)),
        EdlConditionTrigger.of(msgspec.structs.replace(SAVED, metric=BETTER)),
        EdlTaskTrigger(msgspec.to_builtins(spec_of(deadline=5.5))),
        EdlCheckpointTrigger(stream="nightly/train"),
    ],
)
def test_a_trigger_comes_back_from_its_serialized_form(trigger: Any) -> None:
    """Another process makes the same trigger of JSON, and knows it by class and arguments."""
    path, kwargs = trigger.serialize()
    again = resolve_name(path)(**json.loads(json.dumps(kwargs)))
    assert again.serialize() == (path, kwargs)
    assert getattr(again, "condition", None) == getattr(trigger, "condition", None)


@pytest.mark.parametrize(
    ("trigger", "changes"),
    [
        (EdlTaskTrigger(msgspec.to_builtins(spec_of())), {"spec": {}}),
        (EdlConditionTrigger.of(POOL), {"condition": {}}),
        (EdlConditionTrigger.of(POOL), {"kind": "edl_airflow.sensors.teacher_pool.Pool"}),
        (EdlConditionTrigger.of(POOL), {"kind": "edl_airflow.sensors.pools.PoolCondition"}),
        (EdlConditionTrigger.of(POOL), {"kind": "edl_airflow.sensors.teacher_pool.EdlTeacherPoolSensor"}),
        (EdlConditionTrigger.of(POOL), {"kind": "PoolCondition"}),
    ],
)
def test_arguments_of_another_version_fail_one_trigger_only(trigger: Any, changes: dict[str, Any]) -> None:
    """Any error but a TypeError would end the triggerer, and again each time that it is started."""
    path, kwargs = trigger.serialize()
    with pytest.raises(TypeError, match="stored arguments"):
        resolve_name(path)(**{**kwargs, **changes})


def test_a_watcher_needs_a_stream() -> None:
    """Each would have none to watch."""
    with pytest.raises(SpecError, match="stream"):
        EdlCheckpointTrigger(stream="")
