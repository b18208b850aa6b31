"""A student of a pool: what it tells others through a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from edl_runtime.distill.discovery import follow_pool
from edl_runtime.distill.teachers import Discovered
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.registry.pools import view_pool
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.client import connect
from edl_runtime.store.keys import Service

TEACHER = "127.0.0.1:1"


@contextlib.asynccontextmanager
async def student(settings: RuntimeSettings, quarantined: dict[str, str]) -> AsyncIterator[None]:
    """A student that keeps those teachers in quarantine."""
    following = asyncio.create_task(follow_pool(Discovered("pool"), settings, lambda _: None, lambda: quarantined))
    try:
        yield
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def shown(settings: RuntimeSettings) -> str:
    """What a person sees of the one teacher's quarantine."""
    async with connect(settings.redis_url) as client:
        pool = await view_pool(client, settings.namespace, "pool")
    [teacher] = pool.teachers
    return str(teacher.quarantine)


async def until(settings: RuntimeSettings, wanted: str) -> None:
    async with asyncio.timeout(10):
        while await shown(settings) != wanted:  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.05)


async def test_quarantines_are_told_as_long_as_they_last(settings: RuntimeSettings) -> None:
    """Others see which teachers students keep from work, for as long as they do and no longer, and by how many."""
    first, second = {TEACHER: "garbage"}, {TEACHER: "garbage"}
    async with registered_teacher(settings), student(settings, first), student(settings, second):
        await until(settings, "garbage (by 2 students)")
        first.clear()
        await until(settings, "garbage (by 1 student)")
        second.clear()
        await until(settings, "None")
        second[TEACHER] = "silent"
        await until(settings, "silent (by 1 student)")
    # A student that is gone keeps nobody from work.
    async with registered_teacher(settings):
        assert await shown(settings) == "None"


@contextlib.asynccontextmanager
async def registered_teacher(settings: RuntimeSettings) -> AsyncIterator[None]:
    async with (
        connect(settings.redis_url) as client,
        hold_lease(client, Service(settings.namespace, "pool"), Member(id=TEACHER, address=TEACHER)),
    ):
        yield
