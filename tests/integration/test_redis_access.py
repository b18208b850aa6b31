"""A Redis that wants a password or TLS, is none, or can't be closed: everybody says so, or has no need to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.network.certificates import Authority, CertificateFiles
from support.network.proxy import running_proxy
from support.paths import TESTS
from support.teachers.process import PATIENCE_S

from edl_runtime.errors import EX_CONFIG
from edl_runtime.registry.directory import Directory
from edl_runtime.store import redis_client
from edl_runtime.store.errors import RegistryAccessError, RegistryUnavailableError
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer


@pytest.fixture(params=["", ":wrong-one@", "nobody:wrong-one@"], ids=["none", "another", "another user"])
def refused_url(redis_url: str, request: pytest.FixtureRequest) -> str:
    """The URL of a Redis without its password."""
    return f"redis://{request.param}127.0.0.1:{urlsplit(redis_url).port}/0"


def expected(url: str) -> str:
    """Return what is said of this URL."""
    where = urlsplit(url)
    problem = "refuses this user and password" if where.password else "needs a password"
    return f"Redis at 127.0.0.1:{where.port} {problem}"


async def test_a_refused_password_is_named(refused_url: str) -> None:
    """Or that there is none, and where it belongs."""
    async with connect(refused_url) as client:
        with pytest.raises(RegistryAccessError) as caught:
            await Directory(client, "team").pools()
    assert str(caught.value).startswith(expected(refused_url))
    assert "wrong-one" not in str(caught.value)
    assert "EDL_REDIS_URL as redis://USER:PASSWORD@HOST:PORT/0" in str(caught.value)


@asynccontextmanager
async def redis_over_tls(redis_url: str, shown: CertificateFiles) -> AsyncIterator[int]:
    """Serve the same Redis by TLS, at the port that this yields."""

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", urlsplit(redis_url).port)
        await asyncio.gather(forward(reader, redis_writer), forward(redis_reader, writer))
        await redis_writer.wait_closed()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(shown.cert, shown.key)
    async with asyncio.TaskGroup() as served:  # until all clients have gone

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.create_task(serve(reader, writer))

        async with await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context) as server:
            yield server.sockets[0].getsockname()[1]


async def test_closing_fails_nothing(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not either where the end of a TLS connection is lost on its way, as by `kubectl port-forward`."""
    monkeypatch.setattr(redis_client, "CONNECT_TIMEOUT_S", 0.5)
    authority = Authority(tmp_path / "authority")
    login = f"rediss://:{urlsplit(redis_url).password}@127.0.0.1"
    async with redis_over_tls(redis_url, authority.sign("127.0.0.1")) as port:
        with running_proxy("127.0.0.1", port) as proxy:
            async with connect(f"{login}:{proxy.port}/0?ssl_ca_certs={authority.ca}") as client:
                assert await Directory(client, "team").pools() == []
                proxy.lose()


async def test_a_client_without_tls_is_told_of_it(redis_url: str, tmp_path: Path) -> None:
    """A Redis over TLS just ends its connection."""
    shown = Authority(tmp_path / "authority").sign("127.0.0.1")
    async with redis_over_tls(redis_url, shown) as port, connect(f"redis://127.0.0.1:{port}/0") as client:
        with pytest.raises(RegistryUnavailableError, match=r"if it speaks TLS: .* rediss://"):
            await Directory(client, "team").pools()


async def test_a_redis_that_has_answered_is_not_taken_for_one_over_tls(own_redis: RedisServer) -> None:
    """It ends its connections as it is restarted, too."""
    async with connect(own_redis.url) as client:
        assert await Directory(client, "team").pools() == []
        own_redis.kill()
        with pytest.raises(RegistryUnavailableError) as caught:
            await Directory(client, "team").pools()
    assert "TLS" not in str(caught.value)


async def test_another_kind_of_server_is_no_redis() -> None:
    """It answers in another protocol: an error of Redis's like any other, with what it said."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect(f"redis://127.0.0.1:{port}/0") as client:
            with pytest.raises(RegistryUnavailableError, match=f"Redis at 127.0.0.1:{port} .*400 Bad Request"):
                await Directory(client, "team").pools()


@pytest.mark.parametrize(
    "command",
    [
        ("teacher", "--model", "support.models:arithmetic", "--pool", "pool"),
        ("agent", "--instances", "1:1", "--", "python", "-c", "pass"),
    ],
    ids=["teacher", "agent"],
)
def test_what_needs_redis_does_not_start_without_its_password(refused_url: str, command: tuple[str, ...]) -> None:
    """With the exit status of what no restart mends."""
    environ = {**os.environ, "EDL_REDIS_URL": refused_url, "EDL_JOB": "job"}
    run = subprocess.run(
        [sys.executable, "-m", "edl_runtime.cli", *command],
        env=environ,
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert run.returncode == EX_CONFIG
    assert run.stderr.splitlines()[-1].startswith(f"edl: {expected(refused_url)}")
