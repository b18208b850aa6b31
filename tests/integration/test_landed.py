"""Checkpoints that have landed, in a real Redis."""

from __future__ import annotations

import asyncio
import time

import pytest

from edl_runtime.checkpoint import landed
from edl_runtime.checkpoint.landed import Landed
from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.store import keys
from edl_runtime.store.client import connect


def _landed(step: int) -> Landed:
    return Landed(job="job", step=step, epoch=1, generation=2, url=f"/c/{step}", at=1.5, metrics={"accuracy": 0.9})


async def test_what_has_landed_is_read_once_by_whoever_remembers_how_far_he_was(redis_url: str, namespace: str) -> None:
    """Oldest first, all of it, and the newest by itself."""
    async with connect(redis_url) as client:
        assert await landed.newest(client, namespace, "s") is None
        assert await landed.end(client, namespace, "s") == landed.START
        for step in (1, 2):
            await landed.publish(client, namespace, "s", _landed(step))
        found = await landed.after(client, namespace, "s")
        assert [checkpoint for _, checkpoint in found] == [_landed(1), _landed(2)]
        assert await landed.newest(client, namespace, "s") == _landed(2)
        assert await landed.after(client, namespace, "s", found[0][0]) == found[1:]
        assert await landed.end(client, namespace, "s") == found[1][0]
        assert await landed.after(client, namespace, "s", found[1][0], block_ms=0) == []
        assert await landed.after(client, namespace, "other", block_ms=0) == []


async def test_one_that_lands_is_seen_at_once(redis_url: str, namespace: str) -> None:
    """Whoever waits for it is woken; a wait is never longer than the client's patience."""
    async with connect(redis_url) as client, connect(redis_url) as other:
        last = await landed.end(client, namespace, "s")
        assert await landed.after(client, namespace, "s", last, block_ms=60_000) == []
        waiting = asyncio.ensure_future(landed.after(client, namespace, "s", last))
        await asyncio.sleep(0)
        began = time.monotonic()
        await landed.publish(other, namespace, "s", _landed(1))
        assert [checkpoint for _, checkpoint in await waiting] == [_landed(1)]
        assert time.monotonic() - began < 0.5


async def test_a_stream_outlives_its_job_and_does_not_grow_for_ever(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept for 30 days from its last checkpoint, and of many the last ones."""
    monkeypatch.setattr(landed, "MOST_KEPT", 10)
    async with connect(redis_url) as client:
        for step in range(300):
            await landed.publish(client, namespace, "s", _landed(step))
        assert await client.xlen(keys.checkpoints(namespace, "s")) < 150
        assert await client.ttl(keys.checkpoints(namespace, "s")) > 29 * 24 * 3600
        assert await landed.newest(client, namespace, "s") == _landed(299)


async def test_without_redis_it_is_an_error() -> None:
    """The caller decides what that means."""
    async with connect("redis://127.0.0.1:1/0") as client:
        for call in (landed.newest, landed.end, landed.after):
            with pytest.raises(RegistryUnavailableError):
                await call(client, "n", "s")
        with pytest.raises(RegistryUnavailableError):
            await landed.publish(client, "n", "s", _landed(1))
