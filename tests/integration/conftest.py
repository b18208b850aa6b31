"""Fixtures of the integration tests."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import stamina
from redis.asyncio import Redis
from support.backends.local_processes import wait_until_gone
from support.slow_redis import redis_may_be_slow  # noqa: F401

from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.protocol.tls import Trust, client_trust, server_tls_context
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

if TYPE_CHECKING:
    from support.airflow.page import Api
    from support.airflow.world import World


@pytest.fixture
def world(tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world that must have no processes after the test."""
    from support.airflow.world import World, checked_world  # imports Airflow, which most tests do not need

    monkeypatch.setattr("edl_airflow.triggers.base.FIRST_EVENT_AFTER_S", 0.0)
    yield from checked_world(World(tmp_path, redis_url, namespace, monkeypatch))


@pytest.fixture(scope="session")
def airflow_database(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Airflow's tables, empty."""
    from support.airflow.page import made_database

    return made_database(tmp_path_factory.mktemp("airflow"))


@pytest.fixture
def api(world: World, airflow_database: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """The API of the page in the Airflow UI, about `world`."""
    from support.airflow.page import running_api

    yield from running_api(world, airflow_database, monkeypatch)


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """The URL of an S3 server."""
    from support.object_store import running_server  # imports moto

    with running_server() as url:
        yield url


@pytest.fixture
def bucket(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL in an empty bucket, with its settings in the environment; this process repeats its requests at once."""
    from support.object_store import BUCKET, SECRET, empty

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    empty(s3_url)
    with stamina.set_testing(True, attempts=3):
        yield f"s3://{BUCKET}/nightly"


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ssl.SSLContext, Trust]:
    """The TLS context of a teacher at 127.0.0.1, and the trust of a student."""
    from support.network.certificates import Authority

    authority = Authority(tmp_path / "ours")
    certificate = authority.sign("127.0.0.1")
    made = RuntimeSettings(tls_cert=str(certificate.cert), tls_key=str(certificate.key), teacher_ca=str(authority.ca))
    context, trust = server_tls_context(made), client_trust(made)
    assert context is not None
    assert trust is not None
    return context, trust


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    """A client of a real Redis."""
    async with connect(redis_url) as made:
        yield made


@pytest.fixture
async def backend(work_dir: Path) -> AsyncIterator[LocalBackend]:
    """A local backend without jobs; afterwards no process of it remains."""
    made = LocalBackend(work_dir)
    yield made
    for status in await made.list():
        await made.delete(status.name)
    wait_until_gone(work_dir)
