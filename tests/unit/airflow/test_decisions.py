"""What to do next, and how the work ends."""

from __future__ import annotations

import msgspec
import pytest
from support.airflow.fakes import failed_status, job_status, short_of_one, work_of

from edl_airflow.decisions import View, decide, lack
from edl_airflow.work import Outcome, Work
from edl_runtime.backends.base import SUSPENDED, InstanceStatus, JobStatus, Scaling
from edl_runtime.errors import EX_CONFIG
from edl_runtime.specs import Bounds

RUNNING_POOL = job_status("digits", kind="pool")
ALONE = work_of(pool="", pool_job=None, ends_at=1000.0, stop_grace_s=60.0)
RUNNING = View(trainer=job_status("student"), started=True)


def _ends(decision: object) -> str:
    assert isinstance(decision, Outcome), decision
    return decision.ended


def test_the_student_starts_when_enough_teachers_are_registered() -> None:
    """One teacher of two is not enough, two are."""
    assert decide(work_of(), View(pool=RUNNING_POOL, teachers=("a",)), 0) == "wait"
    assert decide(work_of(), View(pool=RUNNING_POOL, teachers=("a", "b")), 0) == "start_trainer"


def test_a_pool_without_a_student_is_ready_then() -> None:
    """The pool's operator is done when its teachers are there."""
    outcome = decide(work_of(trainer_job=None), View(pool=RUNNING_POOL, teachers=("a", "b")), 0)
    assert outcome == Outcome(ended="ready", name="digits", teachers=("a", "b"))


def test_a_pool_of_others_may_run_elsewhere() -> None:
    """Teachers that the backend does not run, and another owner's pool, are as good."""
    work = work_of(pool_job=None)
    assert decide(work, View(teachers=("a", "b")), 0) == "start_trainer"
    assert decide(work, View(pool=job_status("digits", "other"), teachers=("a", "b")), 0) == "start_trainer"


def test_the_wait_for_teachers_ends_with_its_limit_and_says_what_lacks() -> None:
    """Too few teachers, or a silent Redis."""
    for teachers, reason in ((("a",), "1 of the 2"), (None, "Redis does not answer")):
        outcome = decide(work_of(pool_deadline=10), View(pool=RUNNING_POOL, teachers=teachers), 10)
        assert _ends(outcome) == "no_teacher"
        assert isinstance(outcome, Outcome)
        assert reason in outcome.reason


EVICTED = job_status(
    "student",
    phase="failed",
    instances=(InstanceStatus(index=0, phase="failed", started_at=1.0, disruptions=3),),
    reason="evicted",
)


@pytest.mark.parametrize(
    ("view", "last_lines", "permanent", "passing"),
    [
        (View(pool=failed_status("digits", EX_CONFIG, "no such model")), ("no such model",), True, False),
        (View(trainer=failed_status("student", 1, "boom"), started=True), ("boom",), False, False),
        (View(trainer=msgspec.structs.replace(EVICTED, most_disruptions=2), started=True), (), False, True),
        (View(trainer=msgspec.structs.replace(EVICTED, most_disruptions=3), started=True), (), False, False),
    ],
    ids=["a pool's mistake", "a student's bad luck", "evicted too often", "evicted seldom"],
)
def test_what_has_failed_ends_the_work_at_once(
    view: View, last_lines: tuple[str, ...], *, permanent: bool, passing: bool
) -> None:
    """Its last lines say why, and exit status 78 that a retry can't help; what the cluster ends may pass."""
    outcome = decide(work_of(), view, 0)
    assert isinstance(outcome, Outcome)
    assert (outcome.ended, outcome.last_lines) == ("failed", last_lines)
    assert (outcome.permanent, outcome.passing) == (permanent, passing)


@pytest.mark.parametrize(
    "view",
    [
        View(pool=job_status("digits", "try-2"), teachers=("a", "b")),
        View(trainer=job_status("student", "try-2"), started=True),
        View(trainer=job_status("student", "try-2", phase="succeeded"), started=True),
    ],
)
def test_what_a_later_try_has_taken_over_is_left_alone(view: View) -> None:
    """The earlier try starts nothing more and reports nobody else's result."""
    assert _ends(decide(work_of(), view, 0)) == "taken_over"


def test_what_somebody_removed_has_failed() -> None:
    """A pool or student that vanishes is an error, not a wait for ever."""
    assert _ends(decide(work_of(), View(teachers=("a", "b")), 0)) == "failed"
    assert _ends(decide(work_of(), View(started=True), 0)) == "failed"


def test_the_tasks_time_runs_out_unless_the_work_has_ended() -> None:
    """A student that finished in the last moment has finished."""
    work = work_of(deadline=10)
    student = job_status("student")
    assert decide(work, View(trainer=student, started=True), 9) == "wait"
    assert _ends(decide(work, View(trainer=student, started=True), 10)) == "timed_out"
    done = job_status("student", phase="succeeded", result={"checkpoint": "c"})
    assert _ends(decide(work, View(trainer=done, started=True), 10)) == "succeeded"


def test_the_work_survives_the_way_to_the_triggerer() -> None:
    """Plain data and back is the same work."""
    plain = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(work_of(deadline=5.5))))
    assert msgspec.convert(plain, Work) == work_of(deadline=5.5)


def test_teachers_that_can_not_come_any_more_are_not_waited_for() -> None:
    """The backend has given one of two up: it fails at once, in that teacher's words; one alone would be enough."""
    pool = short_of_one("instance 1 exited with 78")
    outcome = decide(work_of(), View(pool=pool, teachers=("a",)), 0)
    assert isinstance(outcome, Outcome)
    assert (outcome.ended, outcome.reason, outcome.permanent) == ("failed", "instance 1 exited with 78", True)
    assert outcome.last_lines == ("another model",)
    assert decide(work_of(at_least=1), View(pool=pool, teachers=()), 0) == "wait"
    assert decide(work_of(), View(pool=pool, teachers=("a", "from-elsewhere")), 0) == "start_trainer"


def test_a_student_that_fails_for_want_of_teachers_tells_what_its_pool_says() -> None:
    """It knows only that there are none; a pool that goes on may be better the next time, one that can't will not."""
    view = View(trainer=failed_status("student", 1, "no teacher"), pool=short_of_one("exited with 78"), started=True)
    outcome = decide(work_of(), view, 0)
    assert isinstance(outcome, Outcome)
    assert outcome.reason == "instance 0 ended with 1; its pool 'digits': exited with 78"
    assert (outcome.last_lines[0], outcome.last_lines[-1]) == ("no teacher", "another model")
    assert not outcome.permanent
    for code, permanent in ((EX_CONFIG, True), (1, False)):
        broken = decide(work_of(), msgspec.structs.replace(view, pool=failed_status("digits", code)), 0)
        assert isinstance(broken, Outcome)
        assert broken.permanent is permanent


def test_a_name_that_went_to_another_task_is_no_later_try() -> None:
    """Ours was stopped by hand, and somebody else has started one of that name."""
    work = work_of(token="mine/1")
    for view in (
        View(pool=job_status("digits", "other/1"), teachers=("a", "b")),
        View(trainer=job_status("student", "other/1"), started=True),
    ):
        outcome = decide(work, view, 0)
        assert isinstance(outcome, Outcome)
        assert (outcome.ended, outcome.reason) == ("failed", "somebody has removed it while it was running")
    mine = View(trainer=job_status("student", "mine/1"), pool=job_status("digits", "other/1"), started=True)
    assert decide(work, mine, 0) == "wait"


def suspended(name: str, *, resized_at: float = 50.0, wanted: int = 0, **changes: object) -> JobStatus:
    """A job that was resized, as to no instances."""
    scaling = Scaling(bounds=Bounds(1, 4), resources={"cpu": 1.0}, resized_at=resized_at)
    told = {} if wanted else {"phase": "pending", "reason": SUSPENDED}
    return job_status(name, wanted=wanted, scaling=scaling, **told, **changes)


def test_teachers_of_a_suspended_pool_are_waited_for_as_long_as_it_is() -> None:
    """It has not failed, and its teachers have the whole wait again when it goes on."""
    work = work_of(pool_deadline=60.0)
    view = View(pool=suspended("digits", kind="pool"), teachers=())
    assert decide(work, view, 10_000.0) == "wait"
    assert lack(work, view) == "the pool is suspended"
    assert _ends(decide(msgspec.structs.replace(work, deadline=9_000.0), view, 10_000.0)) == "timed_out"

    resumed = View(pool=suspended("digits", kind="pool", wanted=2, resized_at=10_000.0), teachers=("a",))
    assert decide(work, resumed, 10_000.0 + work.waits_s - 1) == "wait"
    assert _ends(decide(work, resumed, 10_000.0 + work.waits_s)) == "no_teacher"
    early = View(pool=suspended("digits", kind="pool", wanted=2, resized_at=1.0 - work.waits_s), teachers=("a",))
    assert decide(work, early, 59.0) == "wait"
    assert _ends(decide(work, early, 60.0)) == "no_teacher"


def test_a_suspended_pool_whose_last_teachers_were_given_up_is_not_hopeless() -> None:
    """There are to be none for now; who comes later is tried anew."""
    given_up = (InstanceStatus(index=0, phase="failed", started_at=1.0, exit_code=EX_CONFIG, given_up=True),)
    view = View(pool=suspended("digits", kind="pool", instances=given_up), teachers=())
    assert decide(work_of(), view, 0.0) == "wait"


def test_a_suspended_training_is_followed_until_its_time_to_train_is_over() -> None:
    """It has left its checkpoint then, and nobody is there to be asked for another."""
    work = work_of(ends_at=1000.0)
    student = suspended("student")
    assert decide(work, View(trainer=student, started=True), 999.0) == "wait"
    outcome = decide(work, View(trainer=student, started=True), 1000.0)
    assert isinstance(outcome, Outcome)
    assert (outcome.ended, outcome.reason) == ("stopped", "it was suspended when its time to train was over")
    leaving = (InstanceStatus(index=0, phase="running", started_at=1.0),)
    still = suspended("student", instances=leaving)
    assert decide(work, View(trainer=still, started=True), 1000.0) == "end_trainer"


def test_a_training_without_a_pool_starts_at_once() -> None:
    """And is followed to its end."""
    assert decide(ALONE, View(), 0) == "start_trainer"
    assert decide(ALONE, RUNNING, 999.9) == "wait"
    done = View(trainer=job_status("student", phase="succeeded"), started=True)
    outcome = decide(ALONE, done, 5000)
    assert isinstance(outcome, Outcome)
    assert outcome.ended == "succeeded"


def test_when_its_time_is_over_it_is_asked_to_end_and_then_ended() -> None:
    """Asked until its grace is over, which begins with the first time; the task's own limit holds besides."""
    asked = msgspec.structs.replace(RUNNING, asked_at=1010.0)
    assert decide(ALONE, RUNNING, 1000) == "end_trainer"
    assert decide(ALONE, RUNNING, 5000) == "end_trainer"
    assert decide(ALONE, asked, 1069.9) == "end_trainer"
    ended = decide(ALONE, asked, 1070)
    assert isinstance(ended, Outcome)
    assert (ended.ended, ended.name) == ("stopped", "student")
    assert "within 60 s" in ended.reason
    limited = decide(msgspec.structs.replace(ALONE, deadline=1010), RUNNING, 1010)
    assert isinstance(limited, Outcome)
    assert limited.ended == "timed_out"


def test_a_try_after_its_time_starts_nothing() -> None:
    """What the try before has left running is asked to end."""
    late = decide(ALONE, View(), 1000)
    assert isinstance(late, Outcome)
    assert (late.ended, late.reason) == ("stopped", "the time to train was over before it could begin")
    assert decide(ALONE, RUNNING, 1000) == "end_trainer"
