"""The same DAGs in a real Airflow, with a connection that leads to a cluster: what they start are pods."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster.cluster import Cluster, RedisService
from support.paths import ROOT
from system.test_runs import run_dag

from edl_airflow.laptop.client import AirflowClient
from edl_airflow.laptop.launcher import Laptop

pytestmark = [pytest.mark.kubernetes, pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="session")
def laptop(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, redis_service: RedisService, paddle_image: str
) -> Iterator[Laptop]:
    """A running Airflow on this machine whose connection leads to the cluster."""
    home = tmp_path_factory.mktemp("laptop")
    shared = [home / "airflow" / name for name in ("mnist_distill", "elastic_train")]
    for folder in shared:
        folder.mkdir(parents=True)
    where = ["--data_dir", str(shared[0] / "data"), "--model_dir", str(shared[0] / "teacher")]
    subprocess.run([sys.executable, str(EXAMPLES / "mnist_distill" / "train_teacher.py"), *where], check=True)
    subprocess.run(["cp", "-r", str(shared[0] / "data"), str(shared[1] / "data")], check=True)
    for folder in shared:
        subprocess.run(["chmod", "-R", "a+rwX", str(folder)], check=True)
    laptop = Laptop(
        home,
        dags=ROOT / "dags",
        environ=os.environ,
        say=print,
        connections=_connections(cluster, redis_service, paddle_image, shared),
    )
    with laptop:
        yield laptop


def _connections(cluster: Cluster, redis: RedisService, image: str, shared: list[Path]) -> dict[str, dict[str, Any]]:
    volumes = [{"path": str(folder), "source": {"hostPath": {"path": str(folder)}}} for folder in [EXAMPLES, *shared]]
    pod = {"image": image, "resources": {"cpu": "100m"}, "volumes": volumes}
    extra = {
        "backend": "kubernetes",
        "kubernetes_conn_id": "test_cluster",
        "kubernetes_namespace": cluster.namespace,
        "redis_for_pods": redis.inside,
        "pod": pod,
    }
    return {
        "edl_default": {"conn_type": "edl", "host": redis.host, "password": redis.password, "extra": extra},
        "test_cluster": {"conn_type": "kubernetes", "extra": {"kube_config_path": cluster.kubeconfig}},
    }


@pytest.fixture
def client(laptop: Laptop) -> Iterator[AirflowClient]:
    """A logged-in client of the running Airflow."""
    with laptop.client() as client:
        yield client


def test_the_quickstart_distils_in_pods(laptop: Laptop, client: AirflowClient, cluster: Cluster) -> None:
    """Teachers and student meet through the Service; nothing of it is left in the cluster."""
    said: list[str] = []
    run = run_dag(laptop, client, "edl_quickstart_distill", {"epochs": 4, "teachers_max": 2}, said)
    result = client.xcom(run, "distill")
    assert len(result["answered"]) >= 1
    assert all(not address.startswith("127.") for address in result["answered"])
    assert (laptop.airflow_home / "mnist_distill" / "runs").exists()
    assert cluster.left() == []


def test_a_short_night_trains_and_grows_in_pods(laptop: Laptop, client: AirflowClient, cluster: Cluster) -> None:
    """It ends in time with a checkpoint on the volume."""
    said: list[str] = []
    conf = {"ends_by": "PT2M30S", "trainers_max": 2, "pause_s": 0.05}
    run = run_dag(laptop, client, "edl_nightly_elastic_training", conf, said)
    night = client.xcom(run, "train")
    assert night["stopped"] is True
    assert night["step"] > 0
    assert night["generations"] >= 2
    assert Path(night["checkpoint"]).is_dir()
    assert client.xcom(run, "grow")["job"] == night["job"]
    assert cluster.left() == []
