"""Which resizes were passes'. A size that somebody else has given a job is left alone for some minutes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from edl_runtime.backends.interface import JobStatus
from edl_runtime.store import keys
from edl_runtime.store.redis_client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

KEPT_S = 3600
"""How long it is kept after the last one: much longer than a size is left alone."""


async def save_resizes(client: Redis, namespace: str, place: str, resized: Mapping[str, float]) -> None:
    """Keep when jobs were resized by a pass, by name. Raises RegistryUnavailableError."""
    key = keys.resizes(namespace, place)
    with unavailable_if_lost(client, key):
        async with client.pipeline(transaction=False) as writes:
            writes.hset(key, mapping={name: repr(at) for name, at in resized.items()})
            writes.expire(key, KEPT_S)
            await writes.execute()


async def resized_by_hand(client: Redis, namespace: str, place: str, jobs: Iterable[JobStatus]) -> frozenset[str]:
    """Return the names of the jobs whose last resize was no pass's. Raises RegistryUnavailableError."""
    key = keys.resizes(namespace, place)
    with unavailable_if_lost(client, key):
        known = await client.hgetall(key)
    resized = {job.name: job.scaling.resized_at for job in jobs if job.scaling and job.scaling.resized_at is not None}
    return frozenset(name for name, at in resized.items() if known.get(name) != repr(at))
