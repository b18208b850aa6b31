"""One Airflow for all system tests, also those on pods: starting it takes the better part of a minute."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import psutil
import pytest
from laptop.launcher import Laptop
from support.airflow.places import Pods
from support.airflow.shared import Airflow
from support.cluster.cluster import PADDLE_IMAGE, unavailable_reason
from support.cluster.pod_faults import kubeconfig_with, server_of
from support.network.proxy import Proxy, running_proxy
from support.paths import ROOT

from edl_runtime.backends.kubernetes import names
from edl_runtime.store.redis_server import RedisServer

EXAMPLES = ROOT / "examples"
OURS = ROOT / "tests" / "system" / "dags"
OPTIONS = {
    "CORE__PARALLELISM": "12",  # tasks that wait for each other's tests
    "WORKERS__MIN_HEARTBEAT_INTERVAL": "2",
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "2",
    "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "5",
    # Who is only slow on a busy machine is not lost: tests set the heartbeats of what they have killed back
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "600",
    "SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "600",
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "600",
    "TRIGGERER__ON_KILL_TIMEOUT": "15",  # 30 otherwise, as long as the API server is away
    # Nor does it give up what is only slow
    "CORE__DAGBAG_IMPORT_TIMEOUT": "300",
    "DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "300",
    "WORKERS__EXECUTION_API_TIMEOUT": "60",
    "WORKERS__MAX_FAILED_HEARTBEATS": "30",
}
"""Of an Airflow that looks often for what it has lost."""

FAILS = """
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG("fails", schedule=None):
    BashOperator(task_id="give_up", bash_command="echo no digits today; exit 3")
"""


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.Popen[bytes], Path]:
    """An example that trains its teacher, meanwhile a database is made."""
    folder = tmp_path_factory.mktemp("trained")
    where = ["--data-dir", str(folder / "data"), "--model-dir", str(folder / "teacher")]
    command = [sys.executable, str(EXAMPLES / "mnist_distill" / "train_teacher.py"), *where]
    return subprocess.Popen(command), folder


@pytest.fixture(scope="session")
def trained(training: tuple[subprocess.Popen[bytes], Path]) -> Path:
    """The folder of an example that has trained its teacher: `data` and `teacher`."""
    process, folder = training
    assert process.wait() == 0
    return folder


@pytest.fixture(scope="session")
def new_airflow(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """Make a folder the home of an Airflow that was never started; its database is a copy of one, as is its secret."""
    first = tmp_path_factory.mktemp("airflow")
    environ = {**os.environ, "AIRFLOW_HOME": str(first), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    subprocess.run([sys.executable, "-m", "airflow", "db", "migrate"], env=environ, check=True, capture_output=True)

    def make(home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        shutil.copy(first / "airflow.db", home)
        (home / "airflow.cfg").write_text((first / "airflow.cfg").read_text().replace(str(first), str(home)))
        (home / "migrated").write_text(version("apache-airflow-core"))

    return make


@pytest.fixture(scope="session")
def dags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our DAGs, and those of the tests."""
    folder = tmp_path_factory.mktemp("dags")
    for file in (*(ROOT / "dags").glob("*.py"), *OURS.glob("*.py")):
        (folder / file.name).symlink_to(file)
    (folder / "fails.py").write_text(FAILS)
    return folder


@pytest.fixture(scope="session")
def pods(request: pytest.FixtureRequest) -> Iterator[Pods | None]:
    """Where tests on pods have them, with a Redis of its own; None without a cluster, or where no test wants one."""
    wanted = any(item.get_closest_marker("kubernetes") for item in request.session.items)
    if not wanted or unavailable_reason(request.config.getoption("--kubeconfig")):
        yield None
        return
    yield Pods(request.getfixturevalue("cluster"), request.getfixturevalue("redis_service"))


@pytest.fixture(scope="session")
def proxy(pods: Pods | None) -> Iterator[Proxy | None]:
    """A way to the cluster's API server that can be cut."""
    if pods is None:
        yield None
        return
    with running_proxy(*server_of(pods.cluster)) as one:
        yield one


@pytest.fixture(scope="session")
def home(
    tmp_path_factory: pytest.TempPathFactory,
    training: object,  # noqa: ARG001 -- begins before the database does
    new_airflow: Callable[[Path], None],
    trained: Path,
) -> Path:
    """The folder of an Airflow that was never started, with a teacher of the example for each place."""
    home = tmp_path_factory.mktemp("laptop")
    shared = home / "airflow" / "on_pods"
    new_airflow(home / "airflow")
    for folder in (home / "airflow", shared):
        shutil.copytree(trained, folder / "mnist_distill")
    shutil.copytree(trained / "data", shared / "elastic_train" / "data")
    subprocess.run(["chmod", "-R", "a+rwX", str(shared)], check=True)
    return home


@pytest.fixture(scope="session")
def laptop(
    home: Path, dags: Path, redis_server: RedisServer, pods: Pods | None, proxy: Proxy | None
) -> Iterator[Laptop]:
    """A running Airflow; when it ends, every process that it ever started must have ended too."""
    connections = {"edl_rescaled": _rescaled(redis_server, home / "rescaled")}
    if pods and proxy:
        connections |= _connections(pods, proxy, home)
    laptop = Laptop(home, dags=dags, environ=os.environ, say=print, options=OPTIONS, connections=connections)
    others = set(psutil.Process().children(recursive=True))
    with laptop:
        yield laptop
        started = set(psutil.Process().children(recursive=True)) - others
    assert [process.name() for process in started if process.is_running() and process.status() != "zombie"] == []
    assert belonging_to(laptop.home) == []


@pytest.fixture(scope="session")
def airflow(
    request: pytest.FixtureRequest, laptop: Laptop, pods: Pods | None, proxy: Proxy | None
) -> Iterator[Airflow]:
    """The running Airflow, in which all tests that go on beside others begin at once."""
    with laptop.client() as client:
        airflow = Airflow(laptop, client, rescaled=laptop.home / "rescaled", pods=pods, proxy=proxy)
        airflow.start(request.session.items)
        try:
            yield airflow
        finally:
            airflow.stop()


def _rescaled(redis: RedisServer, work_dir: Path) -> dict[str, Any]:
    """Return a connection with jobs of its own, which no other test wonders about when they are rescaled."""
    at = urlsplit(redis.url)
    return {
        "conn_type": "edl",
        "host": at.hostname,
        "port": at.port,
        "password": unquote(at.password or ""),
        "extra": {"backend": "local", "work_dir": str(work_dir), "namespace": "rescaled"},
    }


def _connections(pods: Pods, proxy: Proxy, home: Path) -> dict[str, dict[str, Any]]:
    """Return those that lead to the cluster: `edl_far` goes by the proxy, and the pods of `edl_pods` have Paddle.

    Pods see the DAGs of the tests, the folder by which students and tests talk, and those of the examples.
    """
    talking = home / "interrupted"
    talking.mkdir()
    uid = {"name": "STUDENT", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    env = [uid, {"name": "PYTHONPATH", "value": str(OURS)}]

    def to_pods(conn_id: str, image: str, folders: Sequence[Path], **more: Any) -> dict[str, Any]:
        volumes = [{"path": str(folder), "source": {"hostPath": {"path": str(folder)}}} for folder in folders]
        extra = {
            "backend": "kubernetes",
            "kubernetes_conn_id": conn_id,
            "kubernetes_namespace": pods.cluster.namespace,
            "redis_for_pods": pods.redis.address_in_cluster,
            "pod": {"image": image, "volumes": volumes, **more},
        }
        return {"conn_type": "edl", "host": pods.redis.host, "password": pods.redis.password, "extra": extra}

    plain: dict[str, Any] = {
        "image": pods.cluster.image,
        "folders": (OURS, talking),
        "resources": {"cpu": "20m"},
        "template": {"spec": {"containers": [{"name": names.CONTAINER, "env": env}]}},
    }
    examples = (EXAMPLES, home / "airflow" / "on_pods")
    far = kubeconfig_with(pods.cluster, home / "kubeconfig", port=proxy.port)
    return {
        "edl_near": to_pods("near_cluster", **plain),
        "edl_far": to_pods("far_cluster", **plain),
        "edl_pods": to_pods("near_cluster", os.environ.get(PADDLE_IMAGE, ""), examples, resources={"cpu": "100m"}),
        "near_cluster": {"conn_type": "kubernetes", "extra": {"kube_config_path": pods.cluster.kubeconfig}},
        "far_cluster": {"conn_type": "kubernetes", "extra": {"kube_config_path": far}},
    }


def belonging_to(home: Path) -> list[str]:
    """The commands of all processes that work in `home`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.status() != "zombie" and Path(process.cwd()).is_relative_to(home):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
