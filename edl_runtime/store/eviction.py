"""Whether a Redis deletes keys when it is full, as managed ones do unless they are told not to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edl_runtime.store.client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

NEVER = "noeviction"


async def warning(client: Redis) -> str:
    """Return what is to be set in this Redis for it to keep all that is in it, "" if it does.

    It is read from INFO, which a Redis that forbids CONFIG answers, too. Raises RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        memory: dict[str, Any] = await client.info("memory")
    policy, limit = memory.get("maxmemory_policy", NEVER), memory.get("maxmemory", 0)
    if policy == NEVER or not limit:
        return ""
    return (
        f"this Redis deletes keys when it is full (maxmemory-policy {policy}), leases and shards in hand among them; "
        f"set its maxmemory-policy to {NEVER}"
    )
