"""What others ask of a job's trainers: to end with a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edl_runtime.store import keys
from edl_runtime.store.redis_client import run_script

if TYPE_CHECKING:
    from redis.asyncio import Redis


async def request_stop(client: Redis, namespace: str, job: str, reason: str) -> bool:
    """Ask a job's workers to end with a checkpoint; the first reason counts.

    False when none is registered. Repeat it until they have ended: dead instances are detected only after repeated
    requests. Raises RegistryUnavailableError.
    """
    return bool(await run_script(client, "group_stop", keys.group_keys(namespace, job), [reason or "asked to stop"]))
