"""A Redis that wants a password: everybody says so, and nobody tries again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from support.paths import TESTS
from support.teachers.process import PATIENCE_S

from edl_runtime.errors import EX_CONFIG
from edl_runtime.registry.directory import Directory
from edl_runtime.store.errors import RegistryAccessError, RegistryUnavailableError
from edl_runtime.store.redis_client import connect


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
