"""What students say of teachers in a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.registry import quarantine
from edl_runtime.registry.quarantine import KEPT_S, Quarantine
from edl_runtime.store import keys
from edl_runtime.store.client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    async with connect(redis_url) as client:
        yield client


async def test_the_words_of_all_students_are_put_together(client: Redis, namespace: str) -> None:
    """A teacher's most common reason, and how many students keep it from work; others' words don't count."""
    await quarantine.publish(client, namespace, "p", "s0", {"a:1": "silent"})
    await quarantine.publish(client, namespace, "p", "s1", {"a:1": "garbage", "b:1": "wrong dtype"})
    await quarantine.publish(client, namespace, "p", "s2", {"a:1": "garbage"})
    await quarantine.publish(client, namespace, "p", "gone", {"c:1": "silent"})
    assert await quarantine.read(client, namespace, "p", ["s0", "s1", "s2", "quiet"]) == {
        "a:1": Quarantine("garbage", 3),
        "b:1": Quarantine("wrong dtype", 1),
    }
    assert await quarantine.read(client, namespace, "p", []) == {}


async def test_a_word_is_taken_back_or_forgotten(client: Redis, namespace: str) -> None:
    """No teachers end it at once; a student that says nothing more is forgotten by Redis."""
    key = keys.quarantine(namespace, "p", "s0")
    await quarantine.publish(client, namespace, "p", "s0", {"a:1": "silent"})
    assert 0 < await client.ttl(key) <= KEPT_S
    await quarantine.publish(client, namespace, "p", "s0", {})
    assert await client.exists(key) == 0


async def test_words_that_nobody_can_read_hide_no_others(client: Redis, namespace: str) -> None:
    """What something else wrote is left out."""
    await client.set(keys.quarantine(namespace, "p", "odd"), '["a:1"]')
    await quarantine.publish(client, namespace, "p", "s0", {"a:1": "silent"})
    assert await quarantine.read(client, namespace, "p", ["odd", "s0"]) == {"a:1": Quarantine("silent", 1)}


async def test_without_redis_it_is_an_error_of_ours() -> None:
    """Reading and publishing name the Redis that is away."""
    async with connect("redis://127.0.0.1:1/0") as client:
        with pytest.raises(RegistryUnavailableError, match=r"127\.0\.0\.1:1"):
            await quarantine.read(client, "n", "p", ["s0"])
        with pytest.raises(RegistryUnavailableError, match=r"127\.0\.0\.1:1"):
            await quarantine.publish(client, "n", "p", "s0", {})
