"""Drains a teacher: it leaves its pool at once, and its process learns of it with its next renewal.

A drained member is marked until another process registers with its id, or the drain is undone; for a day at most after
the pool was last used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edl_runtime.registry.directory import Directory
from edl_runtime.registry.errors import UnknownTeacherError
from edl_runtime.store import keys
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import run_script, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

KEPT_S = 24 * 3600


async def drain(client: Redis, namespace: str, pool: str, teacher: str) -> None:
    """Take a teacher out of its pool, by its id or address.

    Its students send it no more requests; it answers those in flight, and ends. Raises UnknownTeacherError,
    RegistryUnavailableError.
    """
    members = await Directory(client, namespace).members(pool)
    found = next((member.id for member in members if teacher in (member.id, member.address)), "")
    service = Service(namespace, pool)
    if not found or not await run_script(client, "drain", keys.service_keys(service), [found]):
        raise UnknownTeacherError(pool, teacher, [member.id for member in members])


async def undo_drain(client: Redis, namespace: str, pool: str, teacher: str) -> None:
    """Let a drained server that is not ours join its pool again: its `edl register` waits for that.

    Raises UnknownTeacherError for one that was not drained, RegistryUnavailableError.
    """
    key = _key(Service(namespace, pool))
    with unavailable_if_lost(client, key):
        removed: Any = client.hdel(key, teacher)
        if await removed:
            return
    raise UnknownTeacherError(pool, teacher, await drained_members(client, namespace, pool), drained=True)


async def drained_members(client: Redis, namespace: str, pool: str) -> list[str]:
    """Return the ids of drained teachers that may not join again, sorted. Raises RegistryUnavailableError."""
    key = _key(Service(namespace, pool))
    with unavailable_if_lost(client, key):
        found: Any = client.hkeys(key)
        return sorted(await found)


async def is_drained(client: Redis, service: Service, member: str) -> bool:
    """Whether this member was drained, and may not join again; keeps its mark. Raises RegistryUnavailableError."""
    key = _key(service)
    with unavailable_if_lost(client, key):
        async with client.pipeline(transaction=True) as both:
            both.hexists(key, member)
            both.expire(key, KEPT_S)
            found, _ = await both.execute()
    return bool(found)


def _key(service: Service) -> str:
    return keys.service_key(service, "drained")
