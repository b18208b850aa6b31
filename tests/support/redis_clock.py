"""Redis's clock as our scripts read it, set by the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edl_runtime.store import redis_client as store_client

if TYPE_CHECKING:
    from redis.asyncio import Redis

START_S = 1_800_000_000


def take_time_from_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all scripts read the time from the key `clock`, in seconds and microseconds."""
    text, clock = store_client._text, "{redis.call('HGET', 'clock', 's'), redis.call('HGET', 'clock', 'us')}"
    monkeypatch.setattr(store_client, "_text", lambda name: text(name).replace("redis.call('TIME')", clock))


async def set_clock(client: Redis, at: float) -> None:
    await client.hset("clock", mapping={"s": int(at), "us": round(at % 1 * 1e6)})


async def later(client: Redis, seconds: float) -> None:
    """Advance the clock. In an empty Redis it starts at START_S."""
    await client.hsetnx("clock", "s", START_S)
    await client.hincrby("clock", "us", round(seconds * 1e6))
