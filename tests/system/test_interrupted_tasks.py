"""Tasks that are ended, cleared, timed out or lost in a real Airflow: no job is leaked, none is run twice.

Students are processes of this machine or pods, and the task runs in a worker or is deferred. Of these four cases each
interruption is tested in one or two, and in the others by `make test-deep`. Components of Airflow are stopped with
their children only where jobs are pods: on this machine jobs are among the children.
"""

from __future__ import annotations

import time
from itertools import product

import pytest
from support.airflow.processes import (
    has_trigger,
    is_alive,
    killed_scheduler,
    killed_triggerer,
    miss_triggerer,
    restarted_triggerer,
    suspended_triggerer,
)
from support.airflow.shared import Airflow, exclusive, in_parallel

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

AWAY_S = 20.0
"""Outage of the API server, longer than the 15 seconds that Airflow waits for `on_kill`, see conftest.py."""


def cases(
    *tested: str, states: tuple[str, ...] = ("running", "deferred"), backends: tuple[str, ...] = ("local", "pods")
) -> pytest.MarkDecorator:
    """Parametrize a test by state and backend; `make test` runs those in `tested` ("running-pods") only."""

    def marks(state: str, backend: str) -> list[pytest.MarkDecorator]:
        on_pods = [pytest.mark.kubernetes] if backend == "pods" else []
        return on_pods if f"{state}-{backend}" in tested else [*on_pods, pytest.mark.deep]

    pairs = product(states, backends)
    params = [pytest.param(*pair, marks=marks(*pair), id="-".join(pair)) for pair in pairs]
    return pytest.mark.parametrize(("state", "backend"), params)


@cases("running-local", "deferred-pods")
@in_parallel
def test_marking_a_task_failed_stops_its_jobs(airflow: Airflow, state: str, backend: str) -> None:
    """The student gets the time to save, longer than the five seconds that Airflow gives the task."""
    case = airflow.case("marked_failed", state, backend)
    case.wait_for_student()
    case.wait_for_state(state)
    task = case.task_process() if state == "running" else None
    case.mark("failed")
    case.wait_for_end("failed")
    case.wait_until_nothing_remains()
    if task:
        case.wait_until(lambda: not is_alive(task.pid), lambda: "the task's process still runs")
    assert case.has_saved()
    assert case.jobs() == 1


@cases("running-pods", states=("running",))
@in_parallel
def test_clearing_a_task_leaves_one_student(airflow: Airflow, state: str, backend: str) -> None:
    """The next try has one student, which the earlier try does not end."""
    case = airflow.case("cleared", state, backend)
    case.wait_for_student()
    case.wait_for_state("running")
    case.clear()
    case.wait_for_state("running", try_number=2)
    case.train_to_the_end()
    assert case.jobs() <= 2, "the next try adopts the student, unless the earlier one has just ended it"


@cases("running-pods", "deferred-local")
@in_parallel
def test_a_timeout_stops_the_jobs_of_a_task(airflow: Airflow, state: str, backend: str) -> None:
    """execution_timeout ends a task in a worker and a deferred one, for which Airflow itself has no timer."""
    for name in ("timed_out", "timed_out_later"):  # on a slow machine no student starts before the first timeout
        case = airflow.case(name, state, backend)
        case.wait_for_end("failed")
        if case.students():
            break
    assert ("AirflowTaskTimeout" if state == "running" else "execution_timeout") in case.log()
    case.wait_until_nothing_remains()
    assert len(case.students()) == 1
    assert case.has_saved()
    assert case.jobs() == 1


@cases("running-pods", states=("running",))
@in_parallel
def test_a_stopped_task_process_stops_its_jobs(airflow: Airflow, state: str, backend: str) -> None:
    """A task that gets SIGTERM stops its jobs; the retry starts new ones."""
    case = airflow.case("stopped_task_process", state, backend)
    student = case.wait_for_student()
    case.task_process().terminate()
    case.wait_for_state("running", try_number=2)
    assert case.has_saved()
    assert case.train_to_the_end() != student
    assert case.jobs() == 2


@cases("running-pods", states=("running",))
@in_parallel
def test_the_retry_of_a_lost_task_process_adopts_its_job(airflow: Airflow, state: str, backend: str) -> None:
    """The retry adopts the student of a task process that was killed, as by the out-of-memory killer."""
    case = airflow.case("lost_task_process", state, backend)
    student = case.wait_for_student()
    case.task_process().kill()
    case.wait_for_state("running", try_number=2)
    case.check_taken_over(student)


@cases("running-local", states=("running",))
@in_parallel
def test_the_retry_of_a_lost_worker_adopts_its_job(airflow: Airflow, state: str, backend: str) -> None:
    """The retry adopts the student of a worker that was killed with its task."""
    case = airflow.case("lost_worker", state, backend)
    student = case.wait_for_student()
    task = case.task_process()
    worker = task.parent()
    assert worker
    worker.kill()
    task.kill()
    case.expire_worker_heartbeat()
    case.wait_for_state("running", try_number=2)
    case.check_taken_over(student)


@cases("running-local", states=("running",))
@in_parallel
def test_the_retry_of_a_lost_supervisor_adopts_its_job(airflow: Airflow, state: str, backend: str) -> None:
    """The retry adopts the student of a worker that was killed alone; its task can't reach Airflow any more."""
    case = airflow.case("lost_supervisor", state, backend)
    student = case.wait_for_student()
    worker = case.task_process().parent()
    assert worker
    worker.kill()
    case.expire_worker_heartbeat()
    case.wait_for_state("running", try_number=2)
    case.check_taken_over(student)


@cases("deferred-local")
@in_parallel
def test_the_retry_of_a_task_that_was_lost_at_its_end_takes_the_result(
    airflow: Airflow, state: str, backend: str
) -> None:
    """Nothing is trained again, until somebody clears the task."""
    case = airflow.case("lost_at_the_end", state, backend)
    student = case.wait_for_student()
    case.finish()
    case.wait_for_the_end_of_work()
    case.task_process().kill()
    case.wait_for_end("success")
    assert case.client.xcom(case.run, "distill")["metrics"]["student"] == student
    assert (case.students(), case.task().try_number) == ([student], 2)
    case.wait_until_nothing_remains()
    case.clear()
    case.wait_until(lambda: len(case.students()) == 2, lambda: "no other student has started")
    case.wait_for_end("success")
    case.wait_until_nothing_remains()


@cases("deferred-local", states=("deferred",), backends=("local",))
@in_parallel
def test_a_failed_step_can_be_cleared(airflow: Airflow, state: str, backend: str) -> None:
    """A failed training has its reason in the log and its pool is stopped; clearing it starts the pool again."""
    case = airflow.case("failed_steps", state, backend)
    case.wait_for_student()
    case.finish()
    case.wait_for_end("failed")
    assert [case.task(task_id).state for task_id in ("start", "distill", "stop")] == ["success", "failed", "success"]
    assert "exited with 3" in case.log()
    assert "loss is not a number" in case.log()
    case.wait_until_nothing_remains()
    case.clear()
    case.wait_for_end("success")
    assert [case.task(task_id).try_number for task_id in ("start", "distill", "stop")] == [2, 2, 2]
    case.wait_until_nothing_remains()


@pytest.mark.kubernetes
@in_parallel
def test_tasks_survive_an_outage_of_the_api_server(airflow: Airflow) -> None:
    """One task follows its student beyond the outage, another sees its student's end, and a third stops its jobs.

    The third was marked as failed in the outage; its trigger stops the jobs once the API server answers.
    """
    assert airflow.proxy
    followed = airflow.case("unreachable", "running", "pods")
    ends = airflow.case("unreachable", "deferred", "pods")
    marked = airflow.case("marked_unreachable", "deferred", "pods")
    student, _, _ = followed.wait_for_student(), ends.wait_for_student(), marked.wait_for_student()
    followed.wait_for_state("running")
    ends.wait_for_state("deferred")
    marked.wait_for_state("deferred")
    airflow.proxy.cut()
    back_at = time.monotonic() + AWAY_S
    ends.finish()
    marked.mark("failed")
    for case in (followed, ends):
        case.wait_until(lambda case=case: "does not answer" in case.log(), lambda: "the log has no line of the outage")
    time.sleep(max(0.0, back_at - time.monotonic()))
    airflow.proxy.mend()

    followed.wait_for_state("running")
    followed.check_taken_over(student)
    ends.wait_for_end("success")
    marked.wait_for_end("failed")
    for case in (ends, marked):
        case.wait_until_nothing_remains()
        assert case.jobs() == len(case.students()) == 1
    assert marked.has_saved()


@cases("deferred-local", states=("deferred",))
@exclusive("cleared")
def test_clearing_a_task_without_a_triggerer_adopts_its_job(airflow: Airflow, state: str, backend: str) -> None:
    """The next try adopts the student, also from the earlier try's trigger, which only ends after that."""
    case = airflow.case("cleared", state, backend)
    student = case.wait_for_student()
    case.wait_for_state("deferred")
    with suspended_triggerer(airflow.laptop):
        case.clear()
        case.wait_for_state("deferred", try_number=2)
    case.check_taken_over(student)


@cases("deferred-local", states=("deferred",))
@exclusive("lost_triggerer")
def test_the_next_triggerer_adopts_jobs_of_a_killed_one(airflow: Airflow, state: str, backend: str) -> None:
    """The training continues, and the next triggerer follows it to its end."""
    case = airflow.case("lost_triggerer", state, backend)
    student = case.wait_for_student()
    case.wait_for_state("deferred")
    with killed_triggerer(airflow.laptop):
        case.check_taken_over(student)


@cases("deferred-local", states=("deferred",), backends=("local",))
@exclusive()  # a case that has started before would end with the triggerer of the test before
def test_what_a_task_leaves_that_was_failed_without_a_triggerer_ends(
    airflow: Airflow, state: str, backend: str
) -> None:
    """The next triggerer drops its trigger, so that nobody follows the student, and stops it as it follows another."""
    case, other = (airflow.case(name, state, backend) for name in ("orphaned", "bystander"))
    case.wait_for_student()
    student = other.wait_for_student()
    for each in (case, other):
        each.wait_for_state("deferred")
    trigger_id = case.trigger_id()
    with killed_triggerer(airflow.laptop, is_missed=False):
        case.mark("failed")
        case.wait_for_end("failed")
        case.wait_until(lambda: not has_trigger(airflow.laptop, trigger_id))
        miss_triggerer(airflow.laptop)
        case.wait_until_nothing_remains()
        assert case.has_saved()
        assert case.jobs() == 1
        other.check_taken_over(student)


@cases("deferred-pods", states=("deferred",), backends=("pods",))
@exclusive("stopped_triggerer")
def test_the_next_triggerer_adopts_jobs_of_a_stopped_one(airflow: Airflow, state: str, backend: str) -> None:
    """A triggerer that gets SIGTERM ends no training; the next one follows it to its end."""
    case = airflow.case("stopped_triggerer", state, backend)
    student = case.wait_for_student()
    case.wait_for_state("deferred")
    with restarted_triggerer(airflow.laptop):
        case.check_taken_over(student)


@cases("deferred-pods", backends=("pods",))
@exclusive("lost_scheduler")
def test_the_next_scheduler_adopts_tasks_of_a_killed_one(airflow: Airflow, state: str, backend: str) -> None:
    """The next scheduler finishes a deferred task, and restarts one in a worker, which has one student."""
    case = airflow.case("lost_scheduler", state, backend)
    student = case.wait_for_student()
    case.wait_for_state(state)
    with killed_scheduler(airflow.laptop):
        if state == "running":
            case.wait_for_state("running", try_number=2)
            case.train_to_the_end()
            assert case.jobs() <= 2, "the next try adopts the student, unless the earlier one has just ended it"
        else:
            case.check_taken_over(student)
