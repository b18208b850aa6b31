"""A real `edl discovery` that is asked by an HTTP client, and a registry behind it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import msgspec
import pytest
from support.teachers.process import PATIENCE_S

from edl_runtime.discovery.messages import Assignment
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.store.client import connect
from edl_runtime.store.keys import Service

NAMESPACE = "endpoint"


def asking(url: str) -> httpx.AsyncClient:
    """A client of the endpoint at that URL."""
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S)


@contextlib.asynccontextmanager
async def member(url: str, pool: str, name: str) -> AsyncIterator[None]:
    """Have a teacher in the pool, though nobody listens there."""
    async with (
        connect(url) as client,
        hold_lease(client, Service(NAMESPACE, pool), Member(id=name, address=f"{name}:1")),
    ):
        yield


@contextlib.asynccontextmanager
async def stream(http: httpx.AsyncClient, path: str, **params: str) -> AsyncIterator[AsyncGenerator[Assignment, None]]:
    """Open a student's stream and give its lines."""
    async with http.stream("GET", path, params=params) as response:
        assert response.status_code == 200

        async def lines() -> AsyncGenerator[Assignment, None]:
            async for line in response.aiter_lines():
                yield msgspec.json.decode(line, type=Assignment)

        async with contextlib.aclosing(lines()) as assignments:
            yield assignments


async def until(assignments: AsyncGenerator[Assignment, None], *wanted: str) -> float:
    """Wait for that assignment; return when it came."""
    async with asyncio.timeout(PATIENCE_S):
        async for assignment in assignments:
            if assignment.teachers == wanted:
                return time.monotonic()
    pytest.fail("the stream ended")


async def students(url: str, pool: str) -> list[str]:
    async with connect(url) as client:
        return [member.id for member in await Directory(client, NAMESPACE).members(pool, "students")]


async def until_gone(url: str, pool: str) -> float:
    async with asyncio.timeout(PATIENCE_S):
        while await students(url, pool):  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.02)
    return time.monotonic()
