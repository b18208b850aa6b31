"""Tasks that are ended, cleared, timed out or lost in a real Airflow, on pods: nothing leaks, nothing doubles.

Each run waits for its test, and some are started ahead. A test and its DAG (tests/system/dags/interrupted.py) have the
same name.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.airflow.interrupted_runs import OPTIONS, Case, registered
from support.airflow.processes import another_scheduler, another_triggerer, halted_triggerer, is_alive, next_triggerer
from support.cluster.cluster import Cluster, RedisService
from support.cluster.pod_faults import kubeconfig_with, server_of
from support.network.proxy import Proxy, running_proxy

from edl_airflow.laptop.client import AirflowClient
from edl_airflow.laptop.launcher import Laptop
from edl_runtime.backends.kubernetes import names

pytestmark = [pytest.mark.kubernetes, pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DAGS = Path(__file__).resolve().parents[1] / "system" / "dags"

AHEAD = 7
"""So many runs there are at a time, each with two pods."""

AWAY_S = 30.0

LIMITS = {
    "SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "15",  # when a lost scheduler is noticed, 30 otherwise
    "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "5",
    "TRIGGERER__ON_KILL_TIMEOUT": "15",  # 30 otherwise, as long as the API server is away
}
"""Of Airflow's patience."""


class Pods:
    """Where students are pods, which know their uids as STUDENT."""

    def __init__(self, cluster: Cluster, redis: RedisService) -> None:
        self._cluster = cluster
        self._redis = redis

    def lives(self, student: str) -> bool:
        pods = self._ask(f"/pods?labelSelector={names.KIND}=trainer")
        phases = {pod["metadata"]["uid"]: pod["status"]["phase"] for pod in pods}
        return phases.get(student, "Failed") not in ("Succeeded", "Failed")

    def left(self, marks: tuple[str, ...]) -> list[str]:
        objects = [one for one in asyncio.run(self._cluster.there()) if one.partition(" ")[2].startswith(marks)]
        return [*objects, *(pool for pool in asyncio.run(registered(self._redis.url)) if pool.startswith(marks))]

    def created(self, marks: tuple[str, ...]) -> dict[str, int]:
        """Return how many pods there have ever been, by what has made them: a Job's are students."""
        events = self._ask("/events?fieldSelector=reason%3DSuccessfulCreate")
        made_by = [event["involvedObject"] for event in events if event["message"].startswith("Created pod")]
        return Counter(owner["kind"] for owner in made_by if owner["name"].startswith(marks))

    def _ask(self, path: str) -> list[dict[str, Any]]:
        found: dict[str, Any] = asyncio.run(
            self._cluster.ask("GET", f"/api/v1/namespaces/{self._cluster.namespace}{path}")
        )
        return found["items"]


class Cases:
    """The runs of tests in their order: who takes one has the next ones started, too."""

    def __init__(self, laptop: Laptop, client: AirflowClient, pods: Pods, tests: list[str]) -> None:
        self._laptop = laptop
        self._client = client
        self._pods = pods
        self._tests = tests
        self._started: dict[str, Case] = {}

    def take(self, test: str) -> Case:
        for due in self._tests[: self._tests.index(test) + AHEAD]:
            if due not in self._started:
                dag_id = due.removeprefix("test_")
                self._started[due] = Case(self._laptop, self._client, self._pods, dag_id)
        return self._started[test]


@pytest.fixture(scope="module")
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    """A way to the API server that can be cut."""
    with running_proxy(*server_of(cluster)) as one:
        yield one


@pytest.fixture(scope="module")
def laptop(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, redis_service: RedisService, proxy: Proxy
) -> Iterator[Laptop]:
    """A running Airflow on this machine with two connections that lead to the cluster; `edl_far` goes by the proxy."""
    home = tmp_path_factory.mktemp("laptop")
    talking = home / "interrupted"
    talking.mkdir()
    far = kubeconfig_with(cluster, home / "kubeconfig", port=proxy.port)
    connections = {
        "edl_default": _connection(cluster, redis_service, talking, "near_cluster"),
        "edl_far": _connection(cluster, redis_service, talking, "far_cluster"),
        "near_cluster": {"conn_type": "kubernetes", "extra": {"kube_config_path": cluster.kubeconfig}},
        "far_cluster": {"conn_type": "kubernetes", "extra": {"kube_config_path": far}},
    }
    options = {**OPTIONS, **LIMITS}
    laptop = Laptop(home, dags=DAGS, environ=os.environ, say=print, options=options, connections=connections)
    with laptop:
        yield laptop


def _connection(cluster: Cluster, redis: RedisService, talking: Path, conn_id: str) -> dict[str, Any]:
    """Return a connection whose pods see the DAGs, and the folder by which students and tests talk."""
    volumes = [{"path": str(folder), "source": {"hostPath": {"path": str(folder)}}} for folder in (DAGS, talking)]
    uid = {"name": "STUDENT", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    env = [uid, {"name": "PYTHONPATH", "value": str(DAGS)}]
    extra = {
        "backend": "kubernetes",
        "kubernetes_conn_id": conn_id,
        "kubernetes_namespace": cluster.namespace,
        "redis_for_pods": redis.inside,
        "pod": {
            "image": cluster.image,
            "resources": {"cpu": "20m"},
            "volumes": volumes,
            "template": {"spec": {"containers": [{"name": names.CONTAINER, "env": env}]}},
        },
    }
    return {"conn_type": "edl", "host": redis.host, "password": redis.password, "extra": extra}


@pytest.fixture(scope="module")
def pods(cluster: Cluster, redis_service: RedisService) -> Pods:
    """Where the students are."""
    return Pods(cluster, redis_service)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, laptop: Laptop, pods: Pods) -> Iterator[Cases]:
    """The runs of all selected tests here."""
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    with laptop.client() as client:
        yield Cases(laptop, client, pods, [item.name for item in here if "case" in item.fixturenames])


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: Cases) -> Case:
    """This test's run."""
    return cases.take(request.node.name)


def test_marked_failed_while_running(case: Case, pods: Pods) -> None:
    """The student gets its time to save, which is longer than the five seconds that Airflow gives the task."""
    case.student()
    case.reaches("running")
    task = case.task_process()
    case.mark("failed")
    case.ends("failed")
    case.leaves_nothing()
    case.until(lambda: not is_alive(task.pid), "the task's process goes on")
    assert case.has_saved()
    assert pods.created(case.marks) == {"Job": 1, "ReplicaSet": 1}


def test_marked_failed_while_deferred(case: Case, pods: Pods) -> None:
    """The trigger stops it all, and the student gets its time to save."""
    case.student()
    case.reaches("deferred")
    case.mark("failed")
    case.ends("failed")
    case.leaves_nothing()
    assert case.has_saved()
    assert pods.created(case.marks) == {"Job": 1, "ReplicaSet": 1}


def test_stopped_task_process(case: Case, pods: Pods) -> None:
    """A task that is told to go by its machine stops all it has; the retry starts anew."""
    student = case.student()
    case.task_process().terminate()
    case.reaches("running", try_number=2)
    assert case.has_saved()
    assert case.trains_to_the_end() != student
    assert pods.created(case.marks) == {"Job": 2, "ReplicaSet": 2}


def test_lost_task_process(case: Case, pods: Pods) -> None:
    """The retry takes over the pods of a task process that was killed, for want of memory perhaps."""
    student = case.student()
    case.task_process().kill()
    case.reaches("running", try_number=2)
    _is_taken_over(case, pods, student)


def test_lost_worker(case: Case, pods: Pods) -> None:
    """The retry takes over the pods of a worker that was killed with its task."""
    student = case.student()
    task = case.task_process()
    worker = task.parent()
    assert worker
    worker.kill()
    task.kill()
    case.reaches("running", try_number=2)
    _is_taken_over(case, pods, student)


def test_cleared_while_running(case: Case, pods: Pods) -> None:
    """The next try has one student, which nothing of the last try ends."""
    case.student()
    case.reaches("running")
    case.clear()
    case.reaches("running", try_number=2)
    case.trains_to_the_end()
    assert pods.created(case.marks) in ({"Job": each, "ReplicaSet": each} for each in (1, 2))


def test_cleared_while_deferred(laptop: Laptop, case: Case, pods: Pods) -> None:
    """The next try takes over the pods, also from the last try's trigger, which is only ended after that."""
    student = case.student()
    case.reaches("deferred")
    with halted_triggerer(laptop):
        case.clear()
        case.reaches("deferred", try_number=2)
    _is_taken_over(case, pods, student)


def test_timed_out_while_running(case: Case, pods: Pods) -> None:
    """execution_timeout of a task that holds a worker."""
    case.ends("failed")
    assert "AirflowTaskTimeout" in case.log()
    case.leaves_nothing()
    assert len(case.students()) == 1
    assert case.has_saved()
    assert pods.created(case.marks) == {"Job": 1, "ReplicaSet": 1}


def test_timed_out_while_deferred(case: Case, pods: Pods) -> None:
    """execution_timeout of a task that Airflow itself has no timer for."""
    case.ends("failed")
    assert "execution_timeout" in case.log()
    case.leaves_nothing()
    assert len(case.students()) == 1
    assert case.has_saved()
    assert pods.created(case.marks) == {"Job": 1, "ReplicaSet": 1}


@pytest.fixture(scope="module")
def outage(cases: Cases, proxy: Proxy) -> dict[str, str]:
    """Half a minute without an API server for three tasks. Return their students, by test.

    Meanwhile one goes on, the student of one ends, and one is marked as failed.
    """
    tests = (
        "test_unreachable_while_running",
        "test_unreachable_while_deferred",
        "test_marked_failed_while_unreachable",
    )
    followed, ends, marked = (cases.take(test) for test in tests)
    students = {test: cases.take(test).student() for test in tests}
    followed.reaches("running")
    for case in (ends, marked):
        case.reaches("deferred")
    proxy.cut()
    back_at = time.monotonic() + AWAY_S
    ends.go()
    marked.mark("failed")
    for case in (followed, ends):
        case.until(lambda case=case: "does not answer" in case.log(), "the log says nothing")
    time.sleep(max(0.0, back_at - time.monotonic()))
    proxy.mend()
    return students


def test_unreachable_while_running(case: Case, outage: dict[str, str], pods: Pods) -> None:
    """The task follows its student for longer than the API server is away, and says that it was."""
    case.reaches("running")
    _is_taken_over(case, pods, outage["test_unreachable_while_running"])


def test_unreachable_while_deferred(case: Case, outage: dict[str, str], pods: Pods) -> None:
    """The task has the result of a student that has ended while the API server was away."""
    case.ends("success")
    assert case.students() == [outage["test_unreachable_while_deferred"]]
    case.leaves_nothing()
    assert pods.created(case.marks) == {"Job": 1, "ReplicaSet": 1}


@pytest.mark.usefixtures("outage")
def test_marked_failed_while_unreachable(case: Case, pods: Pods) -> None:
    """The trigger stops it all once the API server is back, though Airflow does not wait for so long."""
    case.ends("failed")
    case.leaves_nothing()
    assert case.has_saved()
    assert pods.created(case.marks) == {"Job": 1, "ReplicaSet": 1}


def test_stopped_triggerer(laptop: Laptop, case: Case, pods: Pods) -> None:
    """A triggerer that is told to go ends no training; the next one follows it to its end."""
    student = case.student()
    case.reaches("deferred")
    with next_triggerer(laptop):
        _is_taken_over(case, pods, student)


def test_lost_triggerer(laptop: Laptop, case: Case, pods: Pods) -> None:
    """The training goes on, and the next triggerer follows it to its end."""
    student = case.student()
    case.reaches("deferred")
    with another_triggerer(laptop):
        _is_taken_over(case, pods, student)


def test_lost_scheduler_while_running(laptop: Laptop, case: Case, pods: Pods) -> None:
    """The next scheduler takes the task for lost and starts it again; that try has one student, which nothing ends."""
    case.student()
    with another_scheduler(laptop):
        case.reaches("running", try_number=2)
        case.trains_to_the_end()
    assert pods.created(case.marks) in ({"Job": each, "ReplicaSet": each} for each in (1, 2))


def test_lost_scheduler_while_deferred(laptop: Laptop, case: Case, pods: Pods) -> None:
    """The training goes on, and the next scheduler hears from the triggerer how it has ended."""
    student = case.student()
    case.reaches("deferred")
    with another_scheduler(laptop):
        _is_taken_over(case, pods, student)


@pytest.mark.usefixtures("cases")
def test_nothing_is_left(cluster: Cluster) -> None:
    """Of all these runs, by the labels that all objects of ours have."""
    assert cluster.left() == []


def _is_taken_over(case: Case, pods: Pods, student: str) -> None:
    """Check that the student, and no other pod of its kind, trains to the end."""
    assert case.trains_to_the_end() == student
    assert pods.created(case.marks) == {"Job": 1, "ReplicaSet": 1}
