"""What a real Airflow shows of its tasks' pods: why they wait, why they failed, and how often they were ended."""

from __future__ import annotations

import asyncio
import html
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from support.cluster.cluster import Cluster, RedisService
from support.cluster.pod_faults import evict, pods_of

from edl_airflow.laptop.client import AirflowClient, Run, Task
from edl_airflow.laptop.launcher import Laptop

pytestmark = [pytest.mark.kubernetes, pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

DAGS = """
from datetime import timedelta

from airflow.sdk import DAG
from edl_airflow.operators.teacher_pool import EdlTeacherPoolOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_runtime.pods import Pod
from edl_runtime.specs import TeacherSpec, TrainerSpec


def python(code, **pod):
    return TrainerSpec(command=("python", "-c", code), pod=Pod(**pod))


with DAG("mistaken", schedule=None, default_args={"retries": 2, "retry_delay": timedelta(0), "deferrable": True}):
    EdlTrainOperator(task_id="script", trainer=python("print('no such data set'); raise SystemExit(78)"))
    EdlTrainOperator(task_id="image", trainer=python("pass", image="Not/An:Image:Name"))

with DAG("waits", schedule=None):
    EdlTrainOperator(task_id="train", job="waits", trainer=python("pass", resources={"gpu": 1000}), deferrable=True)
    EdlTeacherPoolOperator(
        task_id="pool",
        teacher_pool="waiting-pool",
        teacher=TeacherSpec(model="/models/none", pod=Pod(resources={"gpu": 1000})),
        teachers="1",
        deferrable=True,
    )

with DAG("evicted", schedule=None):
    sleeps = python("import time; print('up', flush=True); time.sleep(600)", disruptions=1)
    EdlTrainOperator(task_id="train", job="evicted", trainer=sleeps, deferrable=True)
"""

WITHIN_S = 180.0
"""Longest wait for anything that has to happen."""

OVER = ("success", "failed")


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, redis_service: RedisService) -> Iterator[Laptop]:
    """A running Airflow on this machine whose connection leads to the cluster."""
    dags = tmp_path_factory.mktemp("dags")
    (dags / "tells.py").write_text(DAGS)
    extra = {
        "backend": "kubernetes",
        "kubernetes_conn_id": "test_cluster",
        "kubernetes_namespace": cluster.namespace,
        "redis_for_pods": redis_service.inside,
        "pod": {"image": cluster.image, "resources": {"cpu": "20m"}},
    }
    redis = {"conn_type": "edl", "host": redis_service.host, "password": redis_service.password, "extra": extra}
    connections = {
        "edl_default": redis,
        "test_cluster": {"conn_type": "kubernetes", "extra": {"kube_config_path": cluster.kubeconfig}},
    }
    home = tmp_path_factory.mktemp("laptop")
    with Laptop(home, dags=dags, environ=os.environ, say=print, connections=connections) as laptop:
        yield laptop


@pytest.fixture
def client(laptop: Laptop) -> Iterator[AirflowClient]:
    """A logged-in client of the running Airflow."""
    with laptop.client() as client:
        yield client


class Going:
    """A run of a DAG that has begun."""

    def __init__(self, laptop: Laptop, client: AirflowClient, dag_id: str) -> None:
        self.laptop = laptop
        self.client = client
        laptop.wait_for_dag(client, dag_id)
        client.unpause(dag_id)
        self.run: Run = client.trigger(dag_id)

    def tasks(self) -> dict[str, Task]:
        return {task.task_id: task for task in self.client.tasks(self.run)}

    def log(self, task_id: str) -> list[str]:
        return self.client.log(self.run, self.tasks()[task_id])

    def until(self, so: Callable[[], Any]) -> Any:
        """Wait for something to be true, and return it."""
        deadline = time.monotonic() + WITHIN_S
        while not (found := so()):
            self.laptop.check()
            assert time.monotonic() < deadline, self.tasks()
            time.sleep(0.5)
        return found

    def page(self, task_id: str, link: str) -> str:
        """Return the page that a link of the task leads to, as a logged-in browser gets it."""
        url = self.client.links(self.run, task_id)[link]
        return self.fetched(url) if url else ""

    def fetched(self, path: str) -> str:
        login = {"username": self.laptop.user, "password": self.laptop.password}
        with httpx.Client(base_url=self.laptop.url, trust_env=False) as http:
            token = http.post("/auth/token", json=login).json()["access_token"]
            answer = http.get(path, headers={"Authorization": f"Bearer {token}"}, timeout=60)
        assert answer.status_code == 200, answer.text
        return html.unescape(answer.text)


def is_up(going: Going, cluster: Cluster, job: str, other_than: str = "") -> list[str]:
    """Return the names of the job's pods if there is another than that one, and it runs."""
    page = going.fetched(f"/edl/jobs/edl_default/{job}")
    pods = asyncio.run(pods_of(cluster, job))
    return pods if other_than not in pods and '<td class="running">' in page else []


def test_a_task_that_waits_for_gpus_shows_which_pods_do(
    laptop: Laptop, client: AirflowClient, cluster: Cluster
) -> None:
    """Its links lead there while it is deferred; whoever ends it leaves nothing."""
    going = Going(laptop, client, "waits")
    going.until(lambda: all(task.state == "deferred" for task in going.tasks().values()))
    for task_id, link, job in (("train", "Trainers", "waits"), ("pool", "Teacher pool", "waiting-pool")):
        page = going.until(
            lambda task_id=task_id, link=link: "finds no place" in (shown := going.page(task_id, link)) and shown
        )
        (pod,) = asyncio.run(pods_of(cluster, job))
        assert f"<td>{pod}</td>" in page
        assert '<td class="pending">pending</td>' in page
        assert "Insufficient nvidia.com/gpu" in page
        assert f'/edl/jobs/edl_default/{job}/log?instance=0"' in page
        assert "no output yet" in going.fetched(f"/edl/jobs/edl_default/{job}/log?instance=0")
    assert all(task.state == "deferred" for task in going.tasks().values())
    client.fail(going.run)
    going.until(lambda: asyncio.run(cluster.there()) == [])


def test_the_users_mistakes_fail_in_their_first_try(laptop: Laptop, client: AirflowClient, cluster: Cluster) -> None:
    """Though there are two retries; the container's last lines are in the log."""
    going = Going(laptop, client, "mistaken")
    going.until(lambda: client.state(going.run) in OVER)
    tasks = going.tasks()
    assert {(task.state, task.try_number) for task in tasks.values()} == {("failed", 1)}
    script, image = "\n".join(going.log("script")), "\n".join(going.log("image"))
    _, last_lines = script.split("its last lines:")
    assert "no such data set" in last_lines
    assert "InvalidImageName" in image
    assert cluster.left() == []


def test_evictions_are_counted_in_the_log_and_have_a_limit(
    laptop: Laptop, client: AirflowClient, cluster: Cluster
) -> None:
    """Each is one line; one more than is allowed is the end of the task, and of its pods."""
    going = Going(laptop, client, "evicted")
    (first,) = going.until(lambda: asyncio.run(pods_of(cluster, "evicted")) and is_up(going, cluster, "evicted"))
    assert asyncio.run(evict(cluster, first))
    (second,) = going.until(lambda: is_up(going, cluster, "evicted", first))
    assert "<td>1 of at most 1</td>" in going.page("train", "Trainers")
    assert asyncio.run(evict(cluster, second))
    going.until(lambda: client.state(going.run) in OVER)
    log = going.log("train")
    ended = "'evicted': instance 0 was ended by the cluster (Eviction API: evicting) and is replaced: 1 of at most 1"
    assert [line for line in log if "of at most" in line] == [ended]
    said = "instance 0 was evicted, preempted or lost with its node 2 times, and pod.disruptions is 1"
    assert f"{said}; the last time: Eviction API: evicting" in "\n".join(log)
    assert going.tasks()["train"].state == "failed"
    assert cluster.left() == []
