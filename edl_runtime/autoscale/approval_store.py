"""Keeps in Redis for a while what a person has said about a shrink."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from edl_runtime.autoscale.policy.wrappers import ShrinkApproval
from edl_runtime.store import keys
from edl_runtime.store.redis_client import decode_record, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis


async def save_shrink_approval(
    client: Redis, namespace: str, job: str, answer: ShrinkApproval, *, for_s: float, unless_kept: bool = False
) -> None:
    """Keep for so many seconds whether a job may shrink, `unless_kept` only where no answer is kept already.

    Raises RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        name, content = keys.shrink_approval(namespace, job), msgspec.json.encode(answer)
        await client.set(name, content, px=max(1, round(for_s * 1000)), nx=unless_kept)


async def load_shrink_approval(client: Redis, namespace: str, job: str) -> ShrinkApproval | None:
    """Return whether a job may shrink, None if nobody has said so lately, or what can't be read.

    Raises RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        kept = await client.get(keys.shrink_approval(namespace, job))
    return decode_record(kept, ShrinkApproval)
