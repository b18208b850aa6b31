"""Operators without a database: what they start and stop, and the two halves of a deferred task."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.airflow.fakes import MadeUpSite, deferred_by, event_of, job_status, rendered
from support.airflow.templates import SURROUNDINGS, TEACHER, distill

from edl_airflow.failures import TaskKilledError
from edl_airflow.identity import job_name, pool_name, try_token
from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.teacher_pool import EdlTeacherPoolOperator
from edl_airflow.work import Outcome
from edl_runtime.errors import JobFailedError, NoTeacherError, RegistryUnavailableError
from edl_runtime.progress import Progress
from edl_runtime.specs import TeacherSpec, TrainerSpec


def test_an_unknown_connection_fails_at_once(context: Any) -> None:
    """Trying again would not make it known."""
    with pytest.raises(AirflowFailException, match="elsewhere"):
        distill(edl_conn_id="elsewhere").execute(context)


def test_the_first_half_starts_the_pool_and_defers(context: Any, site: MadeUpSite) -> None:
    """Links are there already, and what goes to the triggerer is plain data without the password."""
    operator = rendered(distill(), context)
    deferred = deferred_by(operator, context)
    pool = pool_name(context["ti"])
    assert site.backend.deeds == [("submit", pool)]
    assert deferred.timeout is None
    sent = json.dumps(deferred.trigger.serialize())
    assert "secret" not in sent
    assert context["ti"].xcoms == {
        "_link_StudentsLink": f"/edl/jobs/edl_default/{job_name(context['ti'])}",
        "_link_StudentLogLink": f"/edl/jobs/edl_default/{job_name(context['ti'])}/log",
        "_link_TeacherPoolLink": f"/edl/pools/edl_default/{pool}",
    }
    operator.on_kill()
    assert pool in site.backend.jobs, "what the trigger has taken over is no longer the worker's to kill"


@pytest.mark.parametrize("state", ["failed", "success", "restarting"])
def test_a_task_that_was_ended_meanwhile_does_not_defer(context: Any, site: MadeUpSite, state: str) -> None:
    """Airflow would refuse it, and no trigger would ever stop what was started."""
    context["ti"].state = state
    with pytest.raises(TaskKilledError):
        rendered(distill(), context).execute(context)
    assert site.backend.jobs == {}


def test_a_task_killed_before_it_began_starts_nothing(
    context: Any, site: MadeUpSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow lets `execute` go on after `on_kill`."""
    operator = rendered(distill(), context)
    monkeypatch.setattr("edl_airflow.operators.base.push_links", lambda *_: operator.on_kill())
    with pytest.raises(TaskKilledError):
        operator.execute(context)
    assert site.backend.deeds == []


def test_a_pool_that_is_ready_is_not_killed_any_more(context: Any, site: MadeUpSite) -> None:
    """Airflow ends the process of a finished task by force when it lingers."""
    site.registered = ["127.0.0.1:1"]
    start = EdlTeacherPoolOperator(
        task_id="start", teacher_pool="digits", teacher=TeacherSpec(model="/m"), teachers="1"
    )
    start.execute(context)
    start.on_kill()
    assert "digits" in site.backend.jobs


def test_the_second_half_runs_on_a_fresh_operator(context: Any, site: MadeUpSite) -> None:
    """It stops the pool, forgets the student and returns the typed result."""
    deferred = deferred_by(rendered(distill(), context), context)
    student, pool = job_name(context["ti"]), pool_name(context["ti"])
    site.backend.jobs[student] = job_status(student, try_token(context["ti"]), phase="succeeded")
    left = {"checkpoint": "/c", "metrics": {"accuracy": 0.9}}
    event = event_of(
        deferred,
        Outcome(
            ended="succeeded", name=student, result=left, progress=Progress(step=1, updated_at=1.0, answered={"a:1": 4})
        ),
    )
    result = distill().execute_complete(context, event)
    assert result == {"job": student, "pool": pool, **left, "answered": {"a:1": 4}}
    assert site.backend.jobs == {}


def test_a_failed_student_leaves_nothing_and_its_last_lines(context: Any, site: MadeUpSite) -> None:
    """The task's error is what the script said."""
    deferred = deferred_by(rendered(distill(), context), context)
    event = event_of(deferred, Outcome(ended="failed", name="job", reason="exit 1", last_lines=("KeyError: 'x'",)))
    with pytest.raises(JobFailedError, match="KeyError: 'x'"):
        distill().execute_complete(context, event)
    assert site.backend.jobs == {}


def test_what_has_ended_already_is_not_deferred(context: Any, site: MadeUpSite) -> None:
    """A trigger that fires at once would race with the scheduler."""
    site.registered = ["127.0.0.1:1", "127.0.0.1:2"]
    operator = EdlTeacherPoolOperator(
        task_id="start", teacher_pool="digits", teacher=TeacherSpec(model="/m"), teachers="2:3", deferrable=True
    )
    assert operator.execute(context) == {"pool": "digits", "teachers": site.registered}
    assert "digits" in site.backend.jobs, "a pool that is ready goes on"


def test_a_pool_that_is_not_ready_in_time_is_stopped(context: Any, site: MadeUpSite) -> None:
    """A failed task leaves no pool behind."""
    operator = EdlTeacherPoolOperator(
        task_id="start", teacher_pool="digits", teacher=TeacherSpec(model="/m"), teachers="1", wait_timeout_s=0.05
    )
    with pytest.raises(NoTeacherError, match=r"'digits' after 0 s.*edl pools"):
        operator.execute(context)
    assert site.backend.jobs == {}


def test_execution_timeout_travels_along(context: Any) -> None:
    """Airflow forgets it when a task defers, so the work carries it."""

    def start(**changes: Any) -> EdlTeacherPoolOperator:
        return EdlTeacherPoolOperator(task_id="start", teacher_pool="digits", teacher=TEACHER, teachers="1", **changes)

    for operator in (distill, start):
        assert operator().plan(context, SURROUNDINGS).deadline is None
        before = time.time()
        deadline = operator(execution_timeout=timedelta(seconds=90)).plan(context, SURROUNDINGS).deadline
        assert before <= deadline - 90 <= time.time()


def _left_by_an_earlier_try(context: Any, site: MadeUpSite) -> None:
    """A student and a pool whose worker was lost, beside another task's."""
    before = try_token(context["ti"]).replace("try-1", "try-0")
    names = job_name(context["ti"]), pool_name(context["ti"])
    site.backend.jobs = {name: job_status(name, before) for name in names}
    site.backend.jobs["else"] = job_status("else", "other/1")


@pytest.mark.parametrize("trouble", ["bad params", "no redis"])
def test_a_try_that_can_not_begin_leaves_nothing_of_the_tries_before(
    context: Any, site: MadeUpSite, trouble: str
) -> None:
    """Nobody else would stop it, and what others own goes on."""
    _left_by_an_earlier_try(context, site)
    site.away = trouble == "no redis"
    context["params"] = {"low": 3, "high": 1 if trouble == "bad params" else 3}
    operator = rendered(distill(teachers="{{ params.low }}:{{ params.high }}"), context)
    with pytest.raises((AirflowFailException, RegistryUnavailableError)):
        operator.execute(context)
    assert list(site.backend.jobs) == ["else"]


def test_a_kill_between_the_question_and_the_deferral_is_heeded(context: Any, site: MadeUpSite) -> None:
    """Airflow says that the task runs, and ends it while it says so."""
    operator = rendered(distill(), context)
    ask = context["ti"].get_task_states
    context["ti"].get_task_states = lambda **which: (operator.on_kill(), ask(**which))[1]
    with pytest.raises(TaskKilledError):
        operator.execute(context)
    assert site.backend.jobs == {}


def test_the_second_half_needs_no_connection(context: Any, site: MadeUpSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been removed since; the pool is stopped all the same."""
    deferred = deferred_by(rendered(distill(), context), context)
    monkeypatch.delenv("AIRFLOW_CONN_EDL_DEFAULT")
    event = event_of(deferred, Outcome(ended="failed", name="job", reason="exit 1"))
    with pytest.raises(JobFailedError):
        distill().execute_complete(context, event)
    assert site.backend.jobs == {}


@pytest.mark.parametrize("deferrable", [False, True])
def test_a_pool_of_another_running_task_is_refused(context: Any, site: MadeUpSite, deferrable: bool) -> None:  # noqa: FBT001
    """As mapped tasks with one name would have it; the other's pool goes on."""
    site.backend.jobs = {"digits": job_status("digits", "nightly-distill-0-abc/try-9", kind="pool")}
    with pytest.raises(AirflowFailException, match=r"belongs to 'nightly-distill-0-abc'.*ti\.map_index"):
        distill(teacher_pool="digits", deferrable=deferrable).execute(context)
    assert list(site.backend.jobs) == ["digits"]


def test_a_retry_with_another_teacher_does_not_adopt_the_student(context: Any) -> None:
    """What the old teacher has taught is not what the task shall return: it is another job, by its digest."""
    digests = {
        rendered(distill(teacher=TeacherSpec(model=model)), context).plan(context, SURROUNDINGS).trainer_job.digest
        for model in ("models:add", "models:double")
    }
    assert len(digests) == 2


def test_pool_and_student_have_the_priority_and_weight_of_their_task(context: Any) -> None:
    """A task is one matter, whatever it runs."""
    teacher = TeacherSpec(model="models:add")
    sharing: dict[str, Any] = {"priority": 4, "weight": 0.5}
    student = TrainerSpec(command=("s",))
    own = EdlDistillOperator(task_id="d", student=student, students="1:2", teacher=teacher, **sharing)
    pool = EdlTeacherPoolOperator(task_id="p", teacher_pool="digits", teacher=teacher, teachers="1", **sharing)
    works = [rendered(operator, context).plan(context, SURROUNDINGS) for operator in (own, pool)]
    jobs = [job for work in works for job in (work.pool_job, work.trainer_job) if job]
    assert [(job.kind, job.priority, job.weight) for job in jobs] == [
        ("pool", 4, 0.5),
        ("trainer", 4, 0.5),
        ("pool", 4, 0.5),
    ]
