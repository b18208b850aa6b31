"""An `edl discovery` in this process, its HTTP client, and the registry behind it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import msgspec
import pytest
from support.registry.followers import POOL
from support.teachers.process import PATIENCE_S

from edl_runtime.discovery import server
from edl_runtime.discovery.assignments import Assignment
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

STUDENT = f"/v1/pools/{POOL}/students/s"


@contextlib.asynccontextmanager
async def serving(settings: RuntimeSettings) -> AsyncIterator[str]:
    """Run an endpoint in this process, as `edl discovery` does; yield its URL."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    served = asyncio.create_task(server.serve("127.0.0.1", 0, settings, ready.set_result))
    await asyncio.wait([served, ready], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield ready.result() if ready.done() else str(await served)
    finally:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(served, PATIENCE_S)


def http_client(url: str, token: str = "") -> httpx.AsyncClient:
    """Return a client of the endpoint at that URL."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S, headers=headers)


@contextlib.asynccontextmanager
async def stream(
    http: httpx.AsyncClient, path: str = STUDENT, **params: str
) -> AsyncIterator[AsyncGenerator[Assignment, None]]:
    """Open a student's stream and yield its assignments."""
    async with http.stream("GET", path, params=params) as response:
        assert response.status_code == 200

        async def lines() -> AsyncGenerator[Assignment, None]:
            async for line in response.aiter_lines():
                yield msgspec.json.decode(line, type=Assignment)

        async with contextlib.aclosing(lines()) as assignments:
            yield assignments


async def wait_for_teachers(assignments: AsyncGenerator[Assignment, None], *wanted: str) -> None:
    """Wait for an assignment of these teachers."""
    async with asyncio.timeout(PATIENCE_S):
        async for assignment in assignments:
            if assignment.teachers == wanted:
                return
    pytest.fail("the stream ended")


async def read_to_end(assignments: AsyncGenerator[Assignment, None]) -> list[Assignment]:
    """Return all assignments until the stream ends."""
    async with asyncio.timeout(PATIENCE_S):
        return [one async for one in assignments]


async def registered_students(settings: RuntimeSettings) -> list[str]:
    """Return the ids of the students in the pool."""
    async with connect(settings.redis_url) as client:
        return [member.id for member in await Directory(client, settings.namespace).members(POOL, "students")]


async def wait_for_students(settings: RuntimeSettings, *wanted: str) -> None:
    """Wait until exactly these students are registered."""
    async with asyncio.timeout(PATIENCE_S):
        while tuple(await registered_students(settings)) != wanted:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)
