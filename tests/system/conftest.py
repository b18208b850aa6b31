"""One Airflow for all system tests, also those on pods: starting it takes about a minute."""

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
from laptop.environment import USER
from laptop.launcher import Laptop
from support.airflow.job_hosts import PodHost
from support.airflow.shared import Airflow
from support.cluster.cluster import PADDLE_IMAGE, unavailable_reason
from support.cluster.pod_faults import kubeconfig_with, server_of
from support.network.proxy import Proxy, running_proxy
from support.paths import ROOT
from support.slow_redis import patient_with_redis

from edl_runtime.backends.kubernetes import names
from edl_runtime.store.redis_server import RedisServer

EXAMPLES = ROOT / "examples"
OURS = ROOT / "tests" / "system" / "dags"
OPTIONS = {
    "CORE__PARALLELISM": "12",  # the tests' tasks run at the same time
    "CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin,operator:op,viewer:viewer",
    "WORKERS__MIN_HEARTBEAT_INTERVAL": "2",
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "2",
    "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "5",
    # Slow processes are not lost: tests expire the heartbeats of those that they have killed
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "600",
    "SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "600",
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "600",
    "TRIGGERER__ON_KILL_TIMEOUT": "15",  # 30 by default, as long as the outage of the API server
    # Slow imports and heartbeats do not fail, either
    "CORE__DAGBAG_IMPORT_TIMEOUT": "300",
    "DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "300",
    "WORKERS__EXECUTION_API_TIMEOUT": "60",
    "WORKERS__MAX_FAILED_HEARTBEATS": "30",
}
"""Options of an Airflow that checks heartbeats often."""

SETTINGS = """
import edl_airflow.orphans
import edl_runtime.orphans

edl_airflow.orphans.LOOK_EVERY_S = 5.0
edl_runtime.orphans.GRACE_S = 15.0
"""
"""What all processes of that Airflow import: jobs that tasks have left are ended soon."""

FAILS = """
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG("fails", schedule=None):
    BashOperator(task_id="give_up", bash_command="echo no digits today; exit 3")
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what needs this process while the parallel tests run, and exclusive tests last."""
    here = [at for at, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ours = sorted((items[at] for at in here), key=_turn)
    for at, item in zip(here, ours, strict=True):
        items[at] = item


def _turn(item: pytest.Item) -> int:
    test = item.function if isinstance(item, pytest.Function) else None
    return 2 if hasattr(test, "exclusive") else 1 if hasattr(test, "in_parallel") else 0


@pytest.fixture(scope="session", autouse=True)
def redis_may_be_slow() -> Iterator[None]:
    """Wait long for Redis's answers, also between modules: tests run in threads then."""
    with patient_with_redis():
        yield


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.Popen[bytes], Path]:
    """A process that trains the example's teacher in a folder, while the database is made."""
    folder = tmp_path_factory.mktemp("trained")
    where = ["--data-dir", str(folder / "data"), "--model-dir", str(folder / "teacher")]
    command = [sys.executable, str(EXAMPLES / "mnist_distill" / "train_teacher.py"), *where]
    return subprocess.Popen(command), folder


@pytest.fixture(scope="session")
def trained(training: tuple[subprocess.Popen[bytes], Path]) -> Path:
    """The folder of the example's trained teacher: `data` and `teacher`."""
    process, folder = training
    assert process.wait() == 0
    return folder


@pytest.fixture(scope="session")
def new_airflow(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """Make a folder the home of an Airflow that was never started, with a copy of one database and secret."""
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
    """A folder with our DAGs and those of the tests."""
    folder = tmp_path_factory.mktemp("dags")
    for file in (*(ROOT / "dags").glob("*.py"), *OURS.glob("*.py")):
        (folder / file.name).symlink_to(file)
    (folder / "fails.py").write_text(FAILS)
    return folder


@pytest.fixture(scope="session")
def pods(request: pytest.FixtureRequest) -> Iterator[PodHost | None]:
    """The cluster of tests on pods, with a Redis; None without a cluster or without such tests."""
    wanted = any(item.get_closest_marker("kubernetes") for item in request.session.items)
    if not wanted or unavailable_reason(request.config.getoption("--kubeconfig")):
        yield None
        return
    yield PodHost(request.getfixturevalue("cluster"), request.getfixturevalue("redis_service"))


@pytest.fixture(scope="session")
def proxy(pods: PodHost | None) -> Iterator[Proxy | None]:
    """A proxy before the cluster's API server."""
    if pods is None:
        yield None
        return
    with running_proxy(*server_of(pods.cluster)) as one:
        yield one


@pytest.fixture(scope="session")
def redis_proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    """A proxy before Redis, for the connection `edl_watched`."""
    at = urlsplit(redis_server.url)
    with running_proxy(at.hostname or "", at.port or 0) as one:
        yield one


@pytest.fixture(scope="session")
def home(
    tmp_path_factory: pytest.TempPathFactory,
    training: object,  # noqa: ARG001 -- starts before the database is made
    new_airflow: Callable[[Path], None],
    trained: Path,
) -> Path:
    """The folder of an Airflow that was never started, with the example's teacher for local tasks and for pods."""
    home = tmp_path_factory.mktemp("laptop")
    shared = home / "airflow" / "on_pods"
    new_airflow(home / "airflow")
    (home / "airflow" / "config").mkdir(exist_ok=True)
    (home / "airflow" / "config" / "airflow_local_settings.py").write_text(SETTINGS)
    for folder in (home / "airflow", shared):
        shutil.copytree(trained, folder / "mnist_distill")
    shutil.copytree(trained / "data", shared / "elastic_train" / "data")
    subprocess.run(["chmod", "-R", "a+rwX", str(shared)], check=True)
    return home


@pytest.fixture(scope="session")
def connections(
    home: Path, redis_server: RedisServer, redis_proxy: Proxy, pods: PodHost | None, proxy: Proxy | None
) -> dict[str, dict[str, Any]]:
    """Airflow's connections besides `edl_default`, by id."""
    here = {
        "edl_rescaled": _own_jobs(redis_server, home, "rescaled"),
        "edl_watched": _own_jobs(redis_server, home, "watched", port=redis_proxy.port),
        "edl_apart": _own_jobs(redis_server, home, "apart"),
    }
    return here | (_connections(pods, proxy, home) if pods and proxy else {})


@pytest.fixture(scope="session")
def laptop(home: Path, dags: Path, connections: dict[str, dict[str, Any]]) -> Iterator[Laptop]:
    """A running Airflow; afterwards no process that it has started remains."""
    laptop = Laptop(home, dags=dags, environ=os.environ, say=print, options=OPTIONS, connections=connections)
    others = set(psutil.Process().children(recursive=True))
    with laptop:
        yield laptop
        started = set(psutil.Process().children(recursive=True)) - others
    assert [process.name() for process in started if process.is_running() and process.status() != "zombie"] == []
    assert processes_in(laptop.home) == []


@pytest.fixture(scope="session")
def airflow(
    request: pytest.FixtureRequest, laptop: Laptop, pods: PodHost | None, proxy: Proxy | None
) -> Iterator[Airflow]:
    """The running Airflow, in which all parallel tests start at once."""
    with laptop.client() as client:
        airflow = Airflow(laptop, client, rescaled=laptop.home / "rescaled", pods=pods, proxy=proxy)
        airflow.start(request.session.items)
        try:
            yield airflow
        finally:
            airflow.stop()


def _own_jobs(redis: RedisServer, home: Path, namespace: str, port: int = 0) -> dict[str, Any]:
    """Return a connection with jobs of its own, as rescaling would change those of other tests.

    `port`: of a proxy before Redis, 0 for none.
    """
    at = urlsplit(redis.url)
    return {
        "conn_type": "edl",
        "host": at.hostname,
        "port": port or at.port,
        "password": unquote(at.password or ""),
        "extra": {"backend": "local", "work_dir": str(home / namespace), "namespace": namespace},
    }


def _connections(pods: PodHost, proxy: Proxy, home: Path) -> dict[str, dict[str, Any]]:
    """Return the connections to the cluster: `edl_far` uses the proxy, and pods of `edl_pods` have Paddle.

    Pods see the DAGs of the tests, the folder of interrupted students, and the examples.
    """
    interrupted = home / "interrupted"
    interrupted.mkdir()
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
        "folders": (OURS, interrupted),
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


def processes_in(home: Path) -> list[str]:
    """Return the commands of all processes with their working directory in `home`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.status() != "zombie" and Path(process.cwd()).is_relative_to(home):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
