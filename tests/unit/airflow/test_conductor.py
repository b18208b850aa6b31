"""What to do next, and how the work ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from unit.airflow.made_up import MadeUpSite, failed_status, job_status

from edl_airflow import conductor
from edl_airflow.conductor import View, decide
from edl_airflow.work import Outcome, Work
from edl_runtime.errors import EX_CONFIG, RegistryUnavailableError
from edl_runtime.progress import Progress
from edl_runtime.specs import Bounds, JobSpec

POOL = JobSpec(name="digits", kind="pool", command=("t",), bounds=Bounds(2, 3), instances=2)
STUDENT = JobSpec(name="student", kind="trainer", command=("s",), bounds=Bounds(1, 1), instances=1)


def _work(**changes: Any) -> Work:
    given: dict[str, Any] = {
        "conn_id": "edl_default",
        "token": "try-1",
        "pool": "digits",
        "pool_job": POOL,
        "at_least": 2,
        "pool_deadline": 1e12,
        "waits_s": 60,
        "student_job": STUDENT,
        "progress_every_s": 0,
    }
    return Work(**{**given, **changes})


def _ends(decision: object) -> str:
    assert isinstance(decision, Outcome), decision
    return decision.ended


RUNNING_POOL = job_status("digits", kind="pool")


def test_the_student_starts_when_enough_teachers_are_registered() -> None:
    """One teacher of two is not enough, two are."""
    assert decide(_work(), View(pool=RUNNING_POOL, teachers=("a",)), 0) == "wait"
    assert decide(_work(), View(pool=RUNNING_POOL, teachers=("a", "b")), 0) == "start_student"


def test_a_pool_without_a_student_is_ready_then() -> None:
    """The pool's operator is done when its teachers are there."""
    outcome = decide(_work(student_job=None), View(pool=RUNNING_POOL, teachers=("a", "b")), 0)
    assert outcome == Outcome(ended="ready", name="digits", teachers=("a", "b"))


def test_a_pool_of_others_may_run_elsewhere() -> None:
    """Teachers that the backend does not run, and another owner's pool, are as good."""
    work = _work(pool_job=None)
    assert decide(work, View(teachers=("a", "b")), 0) == "start_student"
    assert decide(work, View(pool=job_status("digits", "other"), teachers=("a", "b")), 0) == "start_student"


def test_the_wait_for_teachers_ends_with_its_limit_and_says_what_lacks() -> None:
    """Too few teachers, or a silent Redis."""
    for teachers, reason in ((("a",), "1 of the 2"), (None, "Redis does not answer")):
        outcome = decide(_work(pool_deadline=10), View(pool=RUNNING_POOL, teachers=teachers), 10)
        assert _ends(outcome) == "no_teacher"
        assert isinstance(outcome, Outcome)
        assert reason in outcome.reason


def test_a_failed_pool_ends_the_wait_at_once() -> None:
    """Its teachers' last lines say why, and exit status 78 that a retry can't help."""
    outcome = decide(_work(), View(pool=failed_status("digits", EX_CONFIG, "no such model")), 0)
    assert isinstance(outcome, Outcome)
    assert (outcome.ended, outcome.last_lines, outcome.permanent) == ("failed", ("no such model",), True)


def test_a_failed_student_may_be_tried_again() -> None:
    """Any other exit status is as good as bad luck."""
    outcome = decide(_work(), View(student=failed_status("student", 1, "boom"), started=True), 0)
    assert isinstance(outcome, Outcome)
    assert (outcome.ended, outcome.last_lines, outcome.permanent) == ("failed", ("boom",), False)


@pytest.mark.parametrize(
    "view",
    [
        View(pool=job_status("digits", "try-2"), teachers=("a", "b")),
        View(student=job_status("student", "try-2"), started=True),
        View(student=job_status("student", "try-2", phase="succeeded"), started=True),
    ],
)
def test_what_a_later_try_has_taken_over_is_left_alone(view: View) -> None:
    """The earlier try starts nothing more and reports nobody else's result."""
    assert _ends(decide(_work(), view, 0)) == "taken_over"


def test_what_somebody_removed_has_failed() -> None:
    """A pool or student that vanishes is an error, not a wait for ever."""
    assert _ends(decide(_work(), View(teachers=("a", "b")), 0)) == "failed"
    assert _ends(decide(_work(), View(started=True), 0)) == "failed"


def test_the_tasks_time_runs_out_unless_the_work_has_ended() -> None:
    """A student that finished in the last moment has finished."""
    work = _work(deadline=10)
    student = job_status("student")
    assert decide(work, View(student=student, started=True), 9) == "wait"
    assert _ends(decide(work, View(student=student, started=True), 10)) == "timed_out"
    done = job_status("student", phase="succeeded", result={"checkpoint": "c"})
    assert _ends(decide(work, View(student=done, started=True), 10)) == "succeeded"


def test_the_work_survives_the_way_to_the_triggerer() -> None:
    """Plain data and back is the same work."""
    plain = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(_work(deadline=5.5))))
    assert msgspec.convert(plain, Work) == _work(deadline=5.5)


async def test_a_silent_redis_at_the_start_starts_nothing(site: MadeUpSite) -> None:
    """The error names the address, and there is nothing to clean up."""
    site.away = True
    with pytest.raises(RegistryUnavailableError, match="nowhere:1"):
        await conductor.begin(_work(), site)
    assert site.backend.deeds == []


async def test_a_silent_redis_later_is_ridden_out(site: MadeUpSite) -> None:
    """The training goes on, the log says so once, and the backend tells the end."""
    said: list[str] = []
    site.backend.jobs = {"student": job_status("student")}
    site.away = True

    def say(line: str) -> None:
        said.append(line)
        site.backend.jobs["student"] = job_status("student", phase="succeeded", result={"checkpoint": "c"})

    outcome = await conductor.conduct(_work(), site, say)
    assert (outcome.ended, outcome.result) == ("succeeded", {"checkpoint": "c"})
    assert len(said) == 1
    assert "The training goes on" in said[0]


async def test_progress_is_told_as_it_is_reported(site: MadeUpSite) -> None:
    """Each report once, none of a former run, and the answers by teacher are in the outcome."""
    said: list[str] = []
    site.backend.jobs = {"student": job_status("student", created_at=100.0)}
    site.reports["student"] = Progress(step=99, updated_at=99.0)

    async def progress(job: str) -> Progress | None:
        report = site.reports[job]
        if report.step == 2:
            site.backend.jobs["student"] = job_status("student", phase="succeeded")
        else:
            site.reports["student"] = Progress(
                step=report.step % 98 + 1, updated_at=report.updated_at + 1, answered={"a": 7}
            )
        return report

    site.progress = progress  # type: ignore[method-assign]
    outcome = await conductor.conduct(_work(), site, said.append)
    assert outcome.answered == {"a": 7}
    assert [line.split(" · ")[0] for line in said] == ["step 2"]


async def test_a_try_after_a_lost_worker_adopts_the_student(site: MadeUpSite) -> None:
    """Same spec: nothing is stopped, and the new try owns it."""
    site.backend.jobs = {"student": job_status("student", "try-0", digest=STUDENT.digest)}
    assert await conductor.begin(_work(), site) is None
    assert ("delete", "student") not in site.backend.deeds
    assert site.backend.jobs["student"].token == "try-1"


async def test_a_result_that_nobody_fetched_is_fetched(site: MadeUpSite) -> None:
    """A student that ended while no worker looked is not trained again."""
    site.backend.jobs = {
        "student": job_status("student", "try-0", digest=STUDENT.digest, phase="succeeded", result={"checkpoint": "c"})
    }
    outcome = await conductor.begin(_work(), site)
    assert outcome
    assert outcome.ended == "succeeded"


@pytest.mark.parametrize(
    "earlier", [job_status("student", "try-0", digest="other"), failed_status("student", 1, token="try-0")]
)
async def test_an_earlier_student_of_no_use_goes_first(site: MadeUpSite, earlier: Any) -> None:
    """Another spec, or a failure: it is gone before its pool is touched."""
    site.backend.jobs = {"student": earlier}
    assert await conductor.begin(_work(), site) is None
    assert site.backend.deeds == [("delete", "student"), ("submit", "digits")]


async def test_stopping_hits_only_what_carries_the_token(site: MadeUpSite) -> None:
    """The student that a later try adopted goes on."""
    site.backend.jobs = {"student": job_status("student", "try-2"), "digits": RUNNING_POOL}
    await conductor.stop(_work(), site)
    assert list(site.backend.jobs) == ["student"]
