"""Tasks that are ended, cleared, timed out or lost in a real Airflow: what becomes of them, and that nothing is left.

All runs are started together, each waits for its test: a test and its DAG (dags/interrupted.py) have the same name.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.airflow.interrupted_runs import Case, ThisMachine
from support.airflow.processes import another_triggerer, halted_triggerer, is_alive

from edl_airflow.laptop.client import AirflowClient
from edl_airflow.laptop.launcher import Laptop

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, laptop: Laptop) -> Iterator[dict[str, Case]]:
    """The runs of all selected tests here, by the test's name."""
    tests = [item.name for item in request.session.items if item.path == request.path]
    with laptop.client() as client:
        yield {test: _started(laptop, client, test.removeprefix("test_")) for test in tests}


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    """This test's run."""
    return cases[request.node.name]


def test_marked_failed_while_running(case: Case) -> None:
    """The student gets its time to save, which is longer than the five seconds that Airflow gives the task."""
    case.student()
    case.reaches("running")
    task = case.task_process()
    case.mark("failed")
    case.ends("failed")
    case.leaves_nothing()
    case.until(lambda: not is_alive(task.pid), "the task's process goes on")
    assert case.has_saved()
    assert len(case.students()) == 1


def test_marked_failed_while_deferred(case: Case) -> None:
    """The trigger stops it all, and the student gets its time to save."""
    case.student()
    case.reaches("deferred")
    case.mark("failed")
    case.ends("failed")
    case.leaves_nothing()
    assert case.has_saved()
    assert len(case.students()) == 1


def test_cleared_while_running(case: Case) -> None:
    """The next try has one student, which nothing of the last try ends."""
    case.student()
    case.reaches("running")
    case.clear()
    case.reaches("running", try_number=2)
    case.trains_to_the_end()


def test_cleared_while_deferred(laptop: Laptop, case: Case) -> None:
    """The next try takes over the student, also from the last try's trigger, which is only ended after that."""
    student = case.student()
    case.reaches("deferred")
    with halted_triggerer(laptop):
        case.clear()
        case.reaches("deferred", try_number=2)
    assert case.trains_to_the_end() == student


def test_lost_task_process(case: Case) -> None:
    """The retry takes over the student of a task process that was killed, for want of memory perhaps."""
    student = case.student()
    case.task_process().kill()
    case.reaches("running", try_number=2)
    assert case.trains_to_the_end() == student


def test_lost_worker(case: Case) -> None:
    """The retry takes over the student of a worker that was killed with its task."""
    student = case.student()
    task = case.task_process()
    worker = task.parent()
    assert worker
    worker.kill()
    task.kill()
    case.reaches("running", try_number=2)
    assert case.trains_to_the_end() == student


def test_lost_supervisor(case: Case) -> None:
    """The retry takes over the student of a worker that was killed alone; its task can't reach Airflow any more."""
    student = case.student()
    worker = case.task_process().parent()
    assert worker
    worker.kill()
    case.reaches("running", try_number=2)
    assert case.trains_to_the_end() == student


def test_failed_between_setup_and_teardown(case: Case) -> None:
    """Training that fails says why, and the pool goes away; it comes up again when the training is cleared."""
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


def test_timed_out_while_running(case: Case) -> None:
    """execution_timeout of a task that holds a worker."""
    case.ends("failed")
    assert len(case.students()) == 1
    assert "AirflowTaskTimeout" in case.log()
    case.leaves_nothing()


def test_timed_out_while_deferred(case: Case) -> None:
    """execution_timeout of a task that Airflow itself has no timer for."""
    case.ends("failed")
    assert len(case.students()) == 1
    assert "execution_timeout" in case.log()
    case.leaves_nothing()


def test_quickstart_of_one_epoch(case: Case) -> None:
    """The student has ended before the pool could grow: nothing fails, and there is a report."""
    case.ends("success")
    states = {task.task_id: task.state for task in case.client.tasks(case.run)}
    assert states.pop("pool_in_use") in ("success", "skipped")
    assert states.pop("grow_pool") in ("success", "skipped")
    assert set(states.values()) == {"success"}
    case.leaves_nothing()


def test_lost_triggerer(laptop: Laptop, case: Case) -> None:
    """The training goes on, and the next triggerer follows it to its end. Last, as others defer too."""
    student = case.student()
    with another_triggerer(laptop):
        assert case.trains_to_the_end() == student


def _started(laptop: Laptop, client: AirflowClient, name: str) -> Case:
    if name == "quickstart_of_one_epoch":
        names = ("edl-quickstart-distill", "quickstart-")
        return Case(laptop, client, ThisMachine(laptop), "edl_quickstart_distill", {"epochs": 1}, marks=names)
    return Case(laptop, client, ThisMachine(laptop), name)
