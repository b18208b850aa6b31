"""Students that follow a pool, and members that register in it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

import httpx  # noqa: F401 - a slow import, which would block the loop of the first student
import msgspec
import pytest

from edl_runtime.distill.discovery import follow_pool
from edl_runtime.distill.teacher_addresses import Discovered
from edl_runtime.pool_reports import StudentReport
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.registry.pools import get_pool
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import connect

POOL = "pool"
PATIENCE_S = 100.0


class Student:
    """A student. `updates`: its teachers, with the time of each update; `outages`: why no update could be read."""

    def __init__(self) -> None:
        self.updates: list[tuple[float, tuple[str, ...]]] = []
        self.outages: list[str] = []
        self.quarantined: dict[str, str] = {}

    @property
    def teachers(self) -> tuple[str, ...] | None:
        return self.updates[-1][1] if self.updates else None

    async def wait_for(self, condition: Callable[[tuple[str, ...]], bool]) -> float:
        """Wait until the teachers meet a condition; return the time of that update."""
        async with asyncio.timeout(PATIENCE_S):
            while self.teachers is None or not condition(self.teachers):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        return self.updates[-1][0]

    def report(self) -> StudentReport:
        return StudentReport(quarantined=self.quarantined)

    def update(self, teachers: Collection[str]) -> None:
        self.updates.append((time.monotonic(), tuple(teachers)))


@contextlib.asynccontextmanager
async def student(settings: RuntimeSettings, at_most: int | None = None) -> AsyncIterator[Student]:
    """Follow the pool in the block, which raises what following raises."""
    one = Student()
    wanted = Discovered(POOL, at_most)
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow_pool(wanted, settings, one.update, one.outages.append, one.report))
        yield one
        following.cancel()


async def failure_of(settings: RuntimeSettings) -> Exception:
    """Return the error that a student raises."""
    with pytest.raises(ExceptionGroup) as caught:
        async with student(settings), asyncio.timeout(PATIENCE_S):
            await asyncio.Event().wait()
    [error] = caught.value.exceptions
    assert isinstance(error, Exception)
    return error


async def wait_for_log(logs: Sequence[Mapping[str, Any]], event: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not any(entry["event"] == event for entry in logs):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)


class OneTeacher(Directory):
    """A registry that lists one teacher, no students, and never anything else."""

    def __init__(self) -> None:
        pass

    async def watch(self, pool: str, role: str = "teachers") -> AsyncGenerator[list[Member], None]:
        yield [Member(id="t", address=f"{pool}:1")] if role == "teachers" else []
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def registered(
    settings: RuntimeSettings, *teachers: str, ttl_s: float = 60.0, pool: str = POOL
) -> AsyncIterator[None]:
    """Register teachers with these addresses in the pool; nothing listens there."""
    async with connect(settings.redis_url) as client, contextlib.AsyncExitStack() as stack:
        for address in teachers:
            member = Member(id=address, address=address)
            await stack.enter_async_context(hold_lease(client, Service(settings.namespace, pool), member, ttl_s=ttl_s))
        yield


def discovery_settings(url: str, settings: RuntimeSettings) -> RuntimeSettings:
    """Return the settings of a student with a discovery endpoint and without Redis."""
    return msgspec.structs.replace(settings, redis_url="", discovery_url=url)


async def wait_for_quarantine(settings: RuntimeSettings, wanted: str) -> None:
    """Wait until the quarantine of the only teacher is shown as `wanted`."""
    async with connect(settings.redis_url) as client, asyncio.timeout(PATIENCE_S):
        while True:
            [teacher] = (await get_pool(client, settings.namespace, POOL)).teachers
            if str(teacher.quarantine) == wanted:
                break
            await asyncio.sleep(0.05)
