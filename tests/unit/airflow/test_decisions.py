"""What to do next, and how the work ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.airflow.fakes import STUDENT, degraded_pool, failed_status, job_status, saved, spec_of

from edl_airflow.runtime.decisions import (
    REMOVED_REASON,
    TaskState,
    decide,
    missing_teachers,
    result_warnings,
    unneeded_jobs,
)
from edl_airflow.runtime.spec import TaskOutcome, TaskSpec, TrainingStatus
from edl_runtime.backends.interface import SUSPENDED, InstanceStatus, JobStatus, Scaling
from edl_runtime.errors import EX_CONFIG
from edl_runtime.progress import Progress
from edl_runtime.specs import Bounds

with_ = msgspec.structs.replace


def pool(*teachers: str, job: JobStatus | None = None, **changes: object) -> TaskState:
    """What there is before a student is."""
    return TaskState(pool=job or job_status("digits", kind="pool", **changes), teachers=teachers)


def student(job: JobStatus | None = None, /, **changes: object) -> TaskState:
    """What there is once a student was started, and its pool."""
    teachers = job_status("digits", kind="pool")
    return TaskState(pool=teachers, trainer=job or job_status("student", **changes), started=True)


def suspended(name: str, *, resized_at: float = 50.0, wanted: int = 0, **changes: object) -> JobStatus:
    """A job that was resized, as to no instances."""
    scaling = Scaling(bounds=Bounds(1, 4), resources={"cpu": 1.0}, resized_at=resized_at)
    state = {} if wanted else {"phase": "pending", "reason": SUSPENDED}
    return job_status(name, wanted=wanted, scaling=scaling, **state, **changes)


def resumed(at: float) -> TaskState:
    """A pool that has gone on, with one teacher of two."""
    return pool("a", job=suspended("digits", kind="pool", wanted=2, resized_at=at))


WORK = spec_of()
PATIENT = spec_of(pool_deadline=60.0)
NIGHT = spec_of(ends_at=1000.0)
ALONE = spec_of(pool="", pool_job=None, ends_at=1000.0, stop_grace_s=60.0)
MINE = spec_of(token="mine/1")
RUNNING = student()
DONE = student(phase="succeeded", result={"checkpoint": "c"})
RESTS = pool(job=suspended("digits", kind="pool"))
GIVEN_UP = (InstanceStatus(index=0, phase="failed", started_at=1.0, exit_code=EX_CONFIG, given_up=True),)
LEAVING = (InstanceStatus(index=0, phase="running", started_at=1.0),)
STARTS, WAITS, ENDS = "start_trainer", "wait", "stop_trainer"


@pytest.mark.parametrize(
    ("spec", "view", "now", "decision"),
    [
        pytest.param(WORK, pool("a"), 0, WAITS, id="one teacher of two"),
        pytest.param(WORK, pool("a", "b"), 0, STARTS, id="two of two"),
        pytest.param(spec_of(trainer_job=None), pool("a", "b"), 0, "ready", id="a pool without a student"),
        pytest.param(
            spec_of(pool_job=None), TaskState(teachers=("a", "b")), 0, STARTS, id="teachers that run elsewhere"
        ),
        pytest.param(spec_of(pool_job=None), pool("a", "b", token="other"), 0, STARTS, id="another owner's pool"),
        pytest.param(WORK, pool("a", "b", token="try-2"), 0, "taken_over", id="a later try has the pool"),
        pytest.param(WORK, student(token="try-2"), 0, "taken_over", id="a later try has the student"),
        pytest.param(WORK, student(token="try-2", phase="succeeded"), 0, "taken_over", id="and its result"),
        pytest.param(spec_of(deadline=10), RUNNING, 9, WAITS, id="the task has time left"),
        pytest.param(spec_of(deadline=10), RUNNING, 10, "timed_out", id="the task has none left"),
        pytest.param(spec_of(deadline=10), DONE, 10, "succeeded", id="it ended in the last moment"),
        pytest.param(spec_of(at_least=1), pool(job=degraded_pool("gone")), 0, WAITS, id="one alone is enough"),
        pytest.param(WORK, pool("a", "else", job=degraded_pool("gone")), 0, STARTS, id="another comes from elsewhere"),
        pytest.param(PATIENT, RESTS, 10_000.0, WAITS, id="a suspended pool is waited for"),
        pytest.param(
            with_(PATIENT, deadline=9000.0), RESTS, 10_000.0, "timed_out", id="but not beyond the task's time"
        ),
        pytest.param(PATIENT, resumed(10_000.0), 10_059.0, WAITS, id="its teachers have the whole wait again"),
        pytest.param(PATIENT, resumed(10_000.0), 10_060.0, "no_teacher", id="and no longer"),
        pytest.param(PATIENT, resumed(1.0 - 60), 59.0, WAITS, id="resumed long ago, in time"),
        pytest.param(PATIENT, resumed(1.0 - 60), 60.0, "no_teacher", id="resumed long ago, too late"),
        pytest.param(
            WORK,
            pool(job=suspended("digits", kind="pool", instances=GIVEN_UP)),
            0,
            WAITS,
            id="given up, then suspended",
        ),
        pytest.param(NIGHT, student(suspended("student")), 999.0, WAITS, id="a suspended student is followed"),
        pytest.param(NIGHT, student(suspended("student", instances=LEAVING)), 1000.0, ENDS, id="one that leaves"),
        pytest.param(ALONE, TaskState(), 0, STARTS, id="without a pool it starts at once"),
        pytest.param(ALONE, RUNNING, 999.9, WAITS, id="and is followed"),
        pytest.param(ALONE, DONE, 5000, "succeeded", id="to its end"),
        pytest.param(ALONE, RUNNING, 1000, ENDS, id="its time is over"),
        pytest.param(ALONE, RUNNING, 5000, ENDS, id="nobody was asked, however late"),
        pytest.param(ALONE, with_(RUNNING, asked_at=1010.0), 1069.9, ENDS, id="its grace begins with the question"),
        pytest.param(with_(ALONE, deadline=1010), RUNNING, 1010, "timed_out", id="the task's own limit holds besides"),
        pytest.param(MINE, with_(student(token="mine/1"), pool=pool(token="other/1").pool), 0, WAITS, id="not my pool"),
    ],
)
def test_what_is_next(spec: TaskSpec, view: TaskState, now: float, decision: str) -> None:
    """A student starts when its teachers are there and is followed to its end, or to that of its time."""
    found = decide(spec, view, now)
    assert (found.ended if isinstance(found, TaskOutcome) else found) == decision


@pytest.mark.parametrize(
    ("spec", "view", "now", "ended", "reason"),
    [
        pytest.param(spec_of(pool_deadline=10), pool("a"), 10, "no_teacher", "1 of 2", id="too few teachers"),
        pytest.param(
            spec_of(pool_deadline=10),
            with_(pool(), teachers=None),
            10,
            "no_teacher",
            "Redis does not answer",
            id="a silent Redis",
        ),
        pytest.param(
            WORK, pool("a", job=degraded_pool("exit 78")), 0, "failed", "exit 78", id="a teacher was given up"
        ),
        pytest.param(WORK, TaskState(teachers=("a", "b")), 0, "failed", REMOVED_REASON, id="the pool has vanished"),
        pytest.param(WORK, TaskState(started=True), 0, "failed", REMOVED_REASON, id="the student has vanished"),
        pytest.param(
            MINE, pool("a", "b", token="other/1"), 0, "failed", REMOVED_REASON, id="another task has the pool's name"
        ),
        pytest.param(
            MINE, student(token="other/1"), 0, "failed", REMOVED_REASON, id="another task has the student's name"
        ),
        pytest.param(
            NIGHT,
            student(suspended("student")),
            1000.0,
            "stopped",
            "it was suspended when its time to train was over",
            id="suspended when its time is over",
        ),
        pytest.param(ALONE, with_(RUNNING, asked_at=1010.0), 1070, "stopped", "within 60 s", id="its grace is over"),
        pytest.param(
            ALONE, TaskState(), 1000, "stopped", "the time to train was over before it could begin", id="begun too late"
        ),
    ],
)
def test_the_log_says_why_a_task_ends(spec: TaskSpec, view: TaskState, now: float, ended: str, reason: str) -> None:
    """In words for the task's log."""
    outcome = decide(spec, view, now)
    assert isinstance(outcome, TaskOutcome)
    assert outcome.ended == ended
    assert reason in outcome.reason
    if reason == REMOVED_REASON:
        assert outcome.permanent, "a retry would undo what a person has done"


def test_a_wait_for_teachers_that_is_over_says_what_the_pool_waits_for() -> None:
    """As a queue that has no quota for it, or nodes without room."""
    waits = "0 of 2 run; 2 wait in Kueue's queue 'teach': no quota"
    outcome = decide(PATIENT, pool(reason=waits), 60.0)
    assert isinstance(outcome, TaskOutcome)
    assert (outcome.ended, outcome.reason) == ("no_teacher", f"0 of 2 are registered; {waits}")


def test_a_pool_that_nobody_has_is_not_one_without_teachers() -> None:
    """The log and the error have those that there are."""
    view = TaskState(other_pools="namespace 'default' has digits")
    assert missing_teachers(PATIENT, view) == "no pool of that name is known, and namespace 'default' has digits"
    outcome = decide(msgspec.structs.replace(PATIENT, pool_job=None), view, 60.0)
    assert isinstance(outcome, TaskOutcome)
    assert (outcome.ended, outcome.reason) == ("no_pool", missing_teachers(PATIENT, view))


def test_a_wait_for_teachers_that_load_says_where_to_look() -> None:
    """And what lets them take longer."""
    found = missing_teachers(PATIENT, pool())
    assert found.startswith("0 of 2 are registered; `edl logs digits` shows whether others still load; a longer")


def test_a_suspended_pool_is_named_as_what_lacks() -> None:
    """It has not failed."""
    assert missing_teachers(PATIENT, RESTS) == "the pool is suspended"


EVICTED = job_status(
    "student",
    phase="failed",
    instances=(InstanceStatus(index=0, phase="failed", started_at=1.0, disruptions=3),),
    reason="evicted",
)
NO_TEACHER = failed_status("student", 1, "no teacher")


@pytest.mark.parametrize(
    ("view", "last_lines", "permanent", "transient"),
    [
        (pool(job=failed_status("digits", EX_CONFIG, "no such model")), ("no such model",), True, False),
        (pool("a", job=degraded_pool("instance 1 exited with 78")), ("another model",), True, False),
        (student(failed_status("student", 1, "boom")), ("boom",), False, False),
        (student(with_(EVICTED, most_disruptions=2)), (), False, True),
        (student(with_(EVICTED, most_disruptions=3)), (), False, False),
        (with_(student(NO_TEACHER), pool=failed_status("digits", EX_CONFIG)), ("no teacher",), True, False),
        (with_(student(NO_TEACHER), pool=failed_status("digits", 1)), ("no teacher",), False, False),
        (with_(student(NO_TEACHER), pool=None), ("no teacher",), True, False),
    ],
    ids=[
        "a pool's mistake",
        "too few teachers can come",
        "a student's bad luck",
        "evicted too often",
        "evicted seldom",
        "no teachers by mistake",
        "no teachers by bad luck",
        "somebody has stopped its pool",
    ],
)
def test_what_has_failed_ends_the_work_at_once(
    view: TaskState, last_lines: tuple[str, ...], *, permanent: bool, transient: bool
) -> None:
    """Its last lines say why, and exit status 78 that a retry can't help; what the cluster ends may pass."""
    outcome = decide(WORK, view, 0)
    assert isinstance(outcome, TaskOutcome)
    assert (outcome.ended, outcome.last_lines) == ("failed", last_lines)
    assert (outcome.permanent, outcome.transient) == (permanent, transient)


def test_a_student_that_fails_for_want_of_teachers_tells_what_its_pool_says() -> None:
    """It knows only that there are none; a pool that goes on may be better the next time."""
    outcome = decide(WORK, with_(student(NO_TEACHER), pool=degraded_pool("exited with 78")), 0)
    assert isinstance(outcome, TaskOutcome)
    assert outcome.reason == "instance 0 ended with 1; its pool 'digits': exited with 78"
    assert (outcome.last_lines[0], outcome.last_lines[-1]) == ("no teacher", "another model")
    assert not outcome.permanent


SUCCEEDED = TaskOutcome(ended="succeeded", name="student")
ELASTIC = spec_of(trainer_job=with_(STUDENT, elastic=True))
STEPPED = Progress(step=1, updated_at=101.0)
LEFT = {"checkpoint": "/c", "metrics": {}}


@pytest.mark.parametrize(
    ("spec", "given", "logged"),
    [
        (WORK, {"result": LEFT}, []),
        (WORK, {"checkpoint": saved(1)}, []),
        (WORK, {}, ["left nothing"]),
        (WORK, {"ended": "failed"}, []),
        (spec_of(trainer_job=None), {"ended": "ready"}, []),
        (ELASTIC, {"result": LEFT}, []),
        (ELASTIC, {"result": LEFT, "training": TrainingStatus(members=(0, 1)), "progress": STEPPED}, []),
        (
            ELASTIC,
            {"result": LEFT, "training": TrainingStatus(members=(0, 1))},
            ["each of the 2 instances has run all of it"],
        ),
        (ELASTIC, {"result": LEFT, "training": TrainingStatus(members=(0,))}, []),
        (ELASTIC, {"training": TrainingStatus(members=(0, 1))}, ["left nothing", "without a step"]),
    ],
)
def test_a_training_that_succeeds_in_silence_is_doubted(
    spec: TaskSpec, given: dict[str, Any], logged: list[str]
) -> None:
    """Where a script leaves nothing, or was no elastic one and several instances ran it side by side.

    Not where Redis was away, or it has failed anyhow.
    """
    found = result_warnings(spec, with_(SUCCEEDED, **given))
    assert len(found) == len(logged)
    assert all(part in line for part, line in zip(logged, found, strict=True))


ALONE = spec_of(pool="", pool_job=None)
POOL_ALONE = spec_of(trainer_job=None)


@pytest.mark.parametrize(
    ("spec", "ended", "unneeded"),
    [
        (spec_of(), "succeeded", ("digits",)),
        (spec_of(), "failed", ("student", "digits")),
        (spec_of(), "timed_out", ("student", "digits")),
        (spec_of(), "no_teacher", ("student", "digits")),
        (spec_of(), "taken_over", ()),
        (spec_of(pool_job=None), "succeeded", ()),
        (spec_of(pool_job=None), "failed", ("student",)),
        (ALONE, "succeeded", ()),
        (ALONE, "stopped", ("student",)),
        (POOL_ALONE, "ready", ()),
        (POOL_ALONE, "failed", ("digits",)),
    ],
)
def test_what_has_ended_needs_no_teachers(spec: TaskSpec, ended: str, unneeded: tuple[str, ...]) -> None:
    """A student that has succeeded stays for its result, a pool that is ready for others, and all for a later try."""
    assert unneeded_jobs(spec, ended) == unneeded
