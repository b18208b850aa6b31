"""Tasks that are ended, cleared, timed out or lost in a real Airflow: nothing leaks, nothing doubles.

The students are processes of this machine or pods, and the task runs in a worker or is deferred: of these four each
interruption is shown in one or two, and in the others by `make test-deep`. On pods alone: a component of Airflow that
is ended with its children, which on this machine are jobs, too: so the triggerer that has begun jobs on this machine is
lost before another is told to go.
"""

from __future__ import annotations

import time
from itertools import product

import pytest
from support.airflow.processes import another_scheduler, another_triggerer, halted_triggerer, is_alive, next_triggerer
from support.airflow.shared import Airflow, alone, beside_others

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

AWAY_S = 20.0
"""For so long there is no API server; Airflow waits 15 seconds for what a person has ended, see conftest.py."""


def over(
    *shown: str, states: tuple[str, ...] = ("running", "deferred"), places: tuple[str, ...] = ("local", "pods")
) -> pytest.MarkDecorator:
    """Give a test each state and place; only those that are `shown` ("running-pods") outside of `make test-deep`."""

    def marks(state: str, place: str) -> list[pytest.MarkDecorator]:
        on_pods = [pytest.mark.kubernetes] if place == "pods" else []
        return on_pods if f"{state}-{place}" in shown else [*on_pods, pytest.mark.deep]

    pairs = product(states, places)
    params = [pytest.param(*pair, marks=marks(*pair), id="-".join(pair)) for pair in pairs]
    return pytest.mark.parametrize(("state", "place"), params)


@over("running-local", "deferred-pods")
@beside_others
def test_marked_failed(airflow: Airflow, state: str, place: str) -> None:
    """The student gets its time to save, which is longer than the five seconds that Airflow gives the task."""
    case = airflow.case("marked_failed", state, place)
    case.student()
    case.reaches(state)
    task = case.task_process() if state == "running" else None
    case.mark("failed")
    case.ends("failed")
    case.leaves_nothing()
    if task:
        case.until(lambda: not is_alive(task.pid), lambda: "the task's process goes on")
    assert case.has_saved()
    assert case.jobs() == 1


@over("running-pods", states=("running",))
@beside_others
def test_cleared(airflow: Airflow, state: str, place: str) -> None:
    """The next try has one student, which nothing of the last try ends."""
    case = airflow.case("cleared", state, place)
    case.student()
    case.reaches("running")
    case.clear()
    case.reaches("running", try_number=2)
    case.trains_to_the_end()
    assert case.jobs() in (1, 2)


@over("running-pods", "deferred-local")
@beside_others
def test_timed_out(airflow: Airflow, state: str, place: str) -> None:
    """execution_timeout ends a task in a worker, and one that is deferred, for which Airflow itself has no timer."""
    for name in ("timed_out", "timed_out_later"):  # no student trains in time on a machine that is too slow
        case = airflow.case(name, state, place)
        case.ends("failed")
        if case.students():
            break
    assert ("AirflowTaskTimeout" if state == "running" else "execution_timeout") in case.log()
    case.leaves_nothing()
    assert len(case.students()) == 1
    assert case.has_saved()
    assert case.jobs() == 1


@over("running-pods", states=("running",))
@beside_others
def test_stopped_task_process(airflow: Airflow, state: str, place: str) -> None:
    """A task that is told to go by its machine stops all it has; the retry starts anew."""
    case = airflow.case("stopped_task_process", state, place)
    student = case.student()
    case.task_process().terminate()
    case.reaches("running", try_number=2)
    assert case.has_saved()
    assert case.trains_to_the_end() != student
    assert case.jobs() == 2


@over("running-pods", states=("running",))
@beside_others
def test_lost_task_process(airflow: Airflow, state: str, place: str) -> None:
    """The retry takes over the student of a task process that was killed, for want of memory perhaps."""
    case = airflow.case("lost_task_process", state, place)
    student = case.student()
    case.task_process().kill()
    case.reaches("running", try_number=2)
    case.is_taken_over(student)


@over("running-local", states=("running",))
@beside_others
def test_lost_worker(airflow: Airflow, state: str, place: str) -> None:
    """The retry takes over the student of a worker that was killed with its task."""
    case = airflow.case("lost_worker", state, place)
    student = case.student()
    task = case.task_process()
    worker = task.parent()
    assert worker
    worker.kill()
    task.kill()
    case.misses_its_worker()
    case.reaches("running", try_number=2)
    case.is_taken_over(student)


@over("running-local", states=("running",))
@beside_others
def test_lost_supervisor(airflow: Airflow, state: str, place: str) -> None:
    """The retry takes over the student of a worker that was killed alone; its task can't reach Airflow any more."""
    case = airflow.case("lost_supervisor", state, place)
    student = case.student()
    worker = case.task_process().parent()
    assert worker
    worker.kill()
    case.misses_its_worker()
    case.reaches("running", try_number=2)
    case.is_taken_over(student)


@over("deferred-local", states=("deferred",), places=("local",))
@beside_others
def test_failed_steps(airflow: Airflow, state: str, place: str) -> None:
    """Training that fails says why, and its pool goes by teardown; setup makes it again when training is cleared."""
    case = airflow.case("failed_steps", state, place)
    case.student()
    case.go()
    case.ends("failed")
    assert [case.task(task_id).state for task_id in ("start", "distill", "stop")] == ["success", "failed", "success"]
    assert "exited with 3" in case.log()
    assert "loss is not a number" in case.log()
    case.leaves_nothing()
    case.clear()
    case.ends("success")
    assert [case.task(task_id).try_number for task_id in ("start", "distill", "stop")] == [2, 2, 2]
    case.leaves_nothing()


@pytest.mark.kubernetes
@beside_others
def test_api_server_away_from_pods(airflow: Airflow) -> None:
    """A task follows its student for longer than that, another hears of its student's end, a third is ended after all.

    That one was marked as failed, and Airflow does not wait for so long. Its trigger stops it all once it can.
    """
    assert airflow.proxy
    followed = airflow.case("unreachable", "running", "pods")
    ends = airflow.case("unreachable", "deferred", "pods")
    marked = airflow.case("marked_unreachable", "deferred", "pods")
    student, _, _ = followed.student(), ends.student(), marked.student()
    followed.reaches("running")
    ends.reaches("deferred")
    marked.reaches("deferred")
    airflow.proxy.cut()
    back_at = time.monotonic() + AWAY_S
    ends.go()
    marked.mark("failed")
    for case in (followed, ends):
        case.until(lambda case=case: "does not answer" in case.log(), lambda: "the log says nothing")
    time.sleep(max(0.0, back_at - time.monotonic()))
    airflow.proxy.mend()

    followed.reaches("running")
    followed.is_taken_over(student)
    ends.ends("success")
    marked.ends("failed")
    for case in (ends, marked):
        case.leaves_nothing()
        assert case.jobs() == len(case.students()) == 1
    assert marked.has_saved()


@over("deferred-local", states=("deferred",))
@alone("cleared")
def test_cleared_while_no_trigger_runs(airflow: Airflow, state: str, place: str) -> None:
    """The next try takes over the student, also from the last try's trigger, which is only ended after that."""
    case = airflow.case("cleared", state, place)
    student = case.student()
    case.reaches("deferred")
    with halted_triggerer(airflow.laptop):
        case.clear()
        case.reaches("deferred", try_number=2)
    case.is_taken_over(student)


@over("deferred-local", states=("deferred",))
@alone("lost_triggerer")
def test_lost_triggerer(airflow: Airflow, state: str, place: str) -> None:
    """The training goes on, and the next triggerer follows it to its end."""
    case = airflow.case("lost_triggerer", state, place)
    student = case.student()
    case.reaches("deferred")
    with another_triggerer(airflow.laptop):
        case.is_taken_over(student)


@over("deferred-pods", states=("deferred",), places=("pods",))
@alone("stopped_triggerer")
def test_stopped_triggerer(airflow: Airflow, state: str, place: str) -> None:
    """A triggerer that is told to go ends no training; the next one follows it to its end."""
    case = airflow.case("stopped_triggerer", state, place)
    student = case.student()
    case.reaches("deferred")
    with next_triggerer(airflow.laptop):
        case.is_taken_over(student)


@over("deferred-pods", places=("pods",))
@alone("lost_scheduler")
def test_lost_scheduler(airflow: Airflow, state: str, place: str) -> None:
    """The next one hears how a deferred task has ended, and starts one in a worker again, which has one student."""
    case = airflow.case("lost_scheduler", state, place)
    student = case.student()
    case.reaches(state)
    with another_scheduler(airflow.laptop):
        if state == "running":
            case.reaches("running", try_number=2)
            case.trains_to_the_end()
            assert case.jobs() in (1, 2)
        else:
            case.is_taken_over(student)
