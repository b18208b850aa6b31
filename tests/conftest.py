"""Fixtures of all tests."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
import structlog
from support.depth import DEEP
from support.network.ports import free_ports

if TYPE_CHECKING:
    from support.cluster.cluster import Cluster, RedisService

    from edl_runtime.settings import RuntimeSettings
    from edl_runtime.store.redis_server import RedisServer

# Airflow reads this when it is imported, so it has to be set before any test module is.
if "AIRFLOW_HOME" not in os.environ:
    os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="edl-airflow-home-")
    atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], ignore_errors=True)
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")

# Workers and processes of tests share few cores, where threads that wait for each other cost as much time again. Paddle
# and numpy read this when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores SIGINT for commands in the background; processes that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def skip_on_a_laptop(why: str) -> NoReturn:
    """Skip, but fail in CI: a missing service must not hide tests in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"{why}; CI must have it")
    pytest.skip(why)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a cluster be named."""
    parser.addoption("--kubeconfig", default=os.environ.get("KUBECONFIG", ""), help="of the cluster to test on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make test-deep` runs; begin with the pages, whose two long tests would end a run alone."""
    items.sort(key=lambda item: "/unit/docs/" not in str(item.path))
    if not DEEP:
        left_out = [item for item in items if item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("deep")]


@pytest.fixture(autouse=True)
def structlog_unchanged() -> Iterator[None]:
    """Undo what a command has configured, which would take the output of later tests."""
    before, was_configured = structlog.get_config(), structlog.is_configured()
    yield
    if structlog.get_config() != before:
        structlog.configure(**before) if was_configured else structlog.reset_defaults()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A namespace of this session's own in a real cluster."""
    from support.cluster.cluster import IMAGE, own_namespace, unavailable_reason

    kubeconfig = request.config.getoption("--kubeconfig")
    if why := unavailable_reason(kubeconfig):
        skip_on_a_laptop(why)
    with own_namespace(kubeconfig, os.environ[IMAGE]) as made:
        yield made


@pytest.fixture(scope="session")
def redis_service(cluster: Cluster) -> Iterator[RedisService]:
    """A Redis in a pod, with a password, behind a Service."""
    from support.cluster.cluster import RedisService

    with RedisService(cluster, secrets.token_hex(8)) as service:
        yield service


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Check that no thread of a reader outlives its test."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("edl"):
            thread.join(60)  # readers wait for a second only
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("edl")] == []


@pytest.fixture(scope="session", autouse=True)
def starts_may_be_slow() -> Iterator[None]:
    """Wait longer than users for a Redis or a supervisor that begins while the machine is busy."""
    with pytest.MonkeyPatch.context() as patched:
        for module in ("store.redis_server", "backends.local.backend"):
            patched.setattr(f"edl_runtime.{module}.START_TIMEOUT_S", 100.0)
        yield


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real redis-server of this session's own."""
    from edl_runtime.store.redis_server import RedisServer, find_redis_server

    if find_redis_server() is None:
        skip_on_a_laptop("redis-server is missing")
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The address of the session's Redis, password included. Use `namespace` for keys of the test's own."""
    return redis_server.url


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test has."""
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own, for faults."""
    from edl_runtime.store.redis_server import RedisServer

    (port,) = free_ports(1)  # nobody takes it during a restart
    with RedisServer(tmp_path / "redis", port=port) as server:
        yield server


@pytest.fixture
def settings(redis_url: str, namespace: str) -> RuntimeSettings:
    """Settings of a student with a registry of its own and short leases."""
    from edl_runtime.settings import RuntimeSettings

    return RuntimeSettings(redis_url=redis_url, namespace=namespace, teacher_wait_s=100.0, lease_ttl_s=1.0)


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    """A work folder for the local backend."""
    return tmp_path / "edl"
