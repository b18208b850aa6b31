"""Leases of a checkpoint folder while Redis's clock is set back and forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.redis_clock import START_S, later, set_clock, take_time_from_a_key

from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect, run_script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redis.asyncio import Redis

    from edl_runtime.store.redis_server import RedisServer

HOUR_S = 3600.0
TTL_S = 3.0


@pytest.fixture
async def client(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Redis]:
    """Time passes only where a test says so."""
    take_time_from_a_key(monkeypatch)
    async with connect(own_redis.url) as client:
        await set_clock(client, START_S)
        yield client


async def hold(client: Redis, job: str) -> list[Any]:
    """Take or renew a lease for a process of the job; return who has it, if it is another job."""
    words = [f"{job}-0", round(TTL_S * 1000), job, job, "token"]
    _, *other = await run_script(client, "checkpoint_lease", keys.checkpoint_lease("/kept"), words)
    return other


@pytest.mark.parametrize("jump_s", [-HOUR_S, -0.5])
async def test_a_dead_job_s_place_is_free_when_its_lease_has_run_out_though_the_clock_is_set_back(
    client: Redis, jump_s: float
) -> None:
    """Another job gets the longest time to wait."""
    await hold(client, "dead")
    await set_clock(client, START_S + jump_s)
    assert await hold(client, "next") == ["dead", (START_S + TTL_S) * 1000, TTL_S * 1000]
    await later(client, TTL_S - 0.1)
    assert await hold(client, "next") == ["dead", (START_S + TTL_S) * 1000, 100]
    await later(client, 0.2)
    assert await hold(client, "next") == []


async def test_a_clock_that_was_ahead_and_is_set_right_gives_no_job_a_longer_lease(client: Redis) -> None:
    """A lease that expired while the clock was ahead goes to another job, for the usual time."""
    await hold(client, "dead")
    await set_clock(client, START_S + HOUR_S)
    assert await hold(client, "next") == []
    await set_clock(client, START_S)
    assert await hold(client, "third")
    await later(client, TTL_S + 0.1)
    assert await hold(client, "third") == []


async def test_a_running_job_differs_from_a_dead_one_after_the_clock_is_set_back(client: Redis) -> None:
    """By the deadlines of its leases, which keep changing."""
    await hold(client, "lives")
    await set_clock(client, START_S - HOUR_S)
    _, before, _ = await hold(client, "next")
    await later(client, 0.1)
    await hold(client, "lives")
    _, after, _ = await hold(client, "next")
    assert after == before + 100
