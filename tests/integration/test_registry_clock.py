"""Leases of teachers and students while Redis's clock is set back and on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.redis_clock import START_S, later, set_clock, take_time_from_a_key

from edl_runtime.pool_reports import TeacherReport
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.pools import STALE_AFTER_S, read_demands
from edl_runtime.store import keys
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import connect, run_script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redis.asyncio import Redis

    from edl_runtime.store.redis_server import RedisServer

HOUR_S = 3600.0
TTL_S = 3.0
SERVICE = Service("n", "pool")


@pytest.fixture
async def client(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Redis]:
    """No time passes but where a test lets it."""
    take_time_from_a_key(monkeypatch)
    async with connect(own_redis.url) as client:
        await set_clock(client, START_S)
        yield client


async def join(client: Redis, name: str) -> int:
    """Register a teacher; return its fence."""
    words = [name, round(TTL_S * 1000), f'{{"holder":"a","id":"{name}","address":"{name}:1"}}', ""]
    _, fence = await run_script(client, "register", keys.service_keys(SERVICE), words)
    return int(fence)


async def renew(client: Redis, name: str, fence: int) -> None:
    words = [name, "a", round(TTL_S * 1000), '{"busy":0.5,"over_s":10.0}']
    assert await run_script(client, "renew", keys.service_keys(SERVICE), words) == str(fence)


async def ids(client: Redis) -> list[str]:
    return [member.id for member in await Directory(client, "n").members("pool")]


@pytest.mark.parametrize("jump_s", [-HOUR_S, -0.5])
async def test_a_dead_teacher_goes_with_its_lease_though_the_clock_is_set_back(client: Redis, jump_s: float) -> None:
    """And whoever renews its lease stays."""
    lives, _ = await join(client, "lives"), await join(client, "dead")
    await set_clock(client, START_S + jump_s)
    await renew(client, "lives", lives)
    await later(client, TTL_S - 0.1)
    assert await ids(client) == ["dead", "lives"]
    await renew(client, "lives", lives)
    await later(client, 0.2)
    assert await ids(client) == ["lives"]


async def test_a_clock_that_was_ahead_and_is_set_right_gives_nobody_a_longer_lease(client: Redis) -> None:
    """What ran out while it was ahead comes back as a new member, whose lease is as long as any."""
    await join(client, "t")
    await set_clock(client, START_S + HOUR_S)
    assert await ids(client) == []
    await join(client, "t")
    await set_clock(client, START_S)
    assert await ids(client) == ["t"]
    await later(client, TTL_S + 0.1)
    assert await ids(client) == []


async def test_reports_grow_old_though_the_clock_is_set_back(client: Redis) -> None:
    """So does the news that somebody has joined."""
    fence = await join(client, "t")
    await set_clock(client, START_S - HOUR_S)
    await renew(client, "t", fence)
    assert (await read_demands(client, "n", ["pool"]))["pool"].teachers == {"t": TeacherReport(busy=0.5, over_s=10.0)}
    for _ in range(2):
        await later(client, TTL_S - 0.1)
        words = ["t", "a", round(TTL_S * 1000), ""]
        await run_script(client, "renew", keys.service_keys(SERVICE), words)
    demand = (await read_demands(client, "n", ["pool"]))["pool"]
    assert demand.teachers == {"t": None}
    assert STALE_AFTER_S < demand.settled_s < STALE_AFTER_S + 1
