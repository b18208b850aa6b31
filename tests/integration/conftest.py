"""What tests of real parts share."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis
from support.backends.local_processes import wait_until_gone
from support.slow_redis import redis_may_be_slow  # noqa: F401

from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.protocol.tls import Trust, client_trust, server_tls_context
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

if TYPE_CHECKING:
    from support.airflow.world import World


@pytest.fixture
def world(tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world that must be empty of processes when its test is over."""
    from support.airflow.world import World, checked_world  # Airflow, which most tests do without

    monkeypatch.setattr("edl_airflow.triggers.base.FIRST_EVENT_AFTER_S", 0.0)
    yield from checked_world(World(tmp_path, redis_url, namespace, monkeypatch))


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """The URL of a server that talks S3."""
    from support.object_store import running_server  # moto, which most tests do without

    with running_server() as url:
        yield url


@pytest.fixture
def bucket(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL in an empty bucket, with all that is needed to use it in the environment."""
    from support.object_store import BUCKET, SECRET, empty

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    empty(s3_url)
    return f"s3://{BUCKET}/nightly"


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ssl.SSLContext, Trust]:
    """What a teacher at 127.0.0.1 shows, and who believes it."""
    from support.network.certificates import Authority

    authority = Authority(tmp_path / "ours")
    shown = authority.sign("127.0.0.1")
    made = RuntimeSettings(tls_cert=str(shown.cert), tls_key=str(shown.key), teacher_ca=str(authority.ca))
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
    """A local backend without jobs, and without any process afterwards."""
    made = LocalBackend(work_dir)
    yield made
    for status in await made.list():
        await made.delete(status.name)
    wait_until_gone(work_dir)
