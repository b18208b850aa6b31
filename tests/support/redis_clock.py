"""Redis's clock as our scripts read it, set by hand: no time passes unless a test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edl_runtime.store import redis_client as store_client

if TYPE_CHECKING:
    from redis.asyncio import Redis

START_S = 1_800_000_000


def take_time_from_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all scripts take their time from the key `clock`, of whole seconds and microseconds."""
    text, clock = store_client._text, "{redis.call('HGET', 'clock', 's'), redis.call('HGET', 'clock', 'us')}"
    monkeypatch.setattr(store_client, "_text", lambda name: text(name).replace("redis.call('TIME')", clock))


async def set_clock(client: Redis, at: float) -> None:
    await client.hset("clock", mapping={"s": int(at), "us": round(at % 1 * 1e6)})


async def later(client: Redis, seconds: float) -> None:
    """Let time pass. In an empty Redis it begins anew."""
    await client.hsetnx("clock", "s", START_S)
    await client.hincrby("clock", "us", round(seconds * 1e6))
