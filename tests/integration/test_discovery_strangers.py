"""An endpoint with as many connections as it takes: who has shown the token stays."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import httpx
import pytest
from support.registry.discovery_client import asking, stream, until
from support.teachers.process import PATIENCE_S

from edl_runtime.discovery import server
from edl_runtime.settings import RuntimeSettings

TOKEN = {"Authorization": "Bearer t0ken"}


@pytest.fixture
async def http(redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an endpoint that takes three connections."""
    monkeypatch.setattr(server, "CONNECTION_LIMIT", 3)
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, discovery_token="t0ken")
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(4 * PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve("127.0.0.1", 0, settings, url.set_result))
        async with asking(await url) as client:
            yield client
        signal.raise_signal(signal.SIGTERM)


@contextlib.asynccontextmanager
async def stranger(http: httpx.AsyncClient) -> AsyncIterator[asyncio.StreamReader]:
    """Connect and ask what needs no token."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    writer.write(b"GET /v1/health/live HTTP/1.1\r\nHost: e\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):
        await reader.read(1)
    yield reader
    writer.close()


async def is_dropped(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(1):
            await reader.read()
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


async def test_the_oldest_stranger_makes_room(http: httpx.AsyncClient) -> None:
    """Connections without the token keep nobody out who has it, and end no stream."""
    http.headers.update(TOKEN)
    async with stream(http, "/v1/pools/p/students/s") as assignments:
        await until(assignments)
        async with stranger(http) as oldest, stranger(http) as newer:
            assert (await http.get("/v1/pools")).status_code == 200
            assert await is_dropped(oldest)
            assert not await is_dropped(newer)


async def test_without_a_stranger_the_newest_goes(http: httpx.AsyncClient) -> None:
    """Who has shown the token stays."""
    http.headers.update(TOKEN)
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(stream(http, f"/v1/pools/p/students/{name}")) for name in "stu"]
        async with stranger(http) as newest:
            assert await is_dropped(newest)
        for assignments in streams:
            await until(assignments)
