"""Checkpoints that have landed: told by the agent that wrote one, read by whoever waits for it.

A *stream* of them is named by the one who starts the job, so that it can outlive the job: one of a DAG's task goes on
from run to run. What stands in it says what was written when, not what can be loaded still: the newest ones that
verify are `CheckpointStore`'s to tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from edl_runtime.store import keys
from edl_runtime.store.client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

MOST_KEPT = 1000
"""So many of a stream are kept, or a few more."""

KEPT_S = 30 * 24 * 3600
"""How long a stream outlives its last checkpoint."""

LONGEST_BLOCK_MS = 1000
"""`after` blocks no longer, whatever it is asked: the client takes a longer silence for a Redis that is away."""

START = "0-0"
"""What every checkpoint of a stream has landed after."""

_FIELD = "landed"


class Landed(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is complete.

    - `job`: which job wrote it; `generation`, `step`, `epoch`: when in its training.
    - `url`: of the checkpoint itself, and not of the place where the job keeps all of them.
    - `metrics`: what the script said last by `run.metrics`.
    - `at`: Unix seconds of the writer's clock.
    """

    job: str
    step: int
    epoch: int
    generation: int
    url: str
    at: float
    metrics: dict[str, float] = {}


async def publish(client: Redis, namespace: str, stream: str, landed: Landed) -> None:
    """Add a checkpoint to the stream. Raises RegistryUnavailableError."""
    key = keys.checkpoints(namespace, stream)
    with unavailable_if_lost(client):
        async with client.pipeline(transaction=True) as both:
            both.xadd(key, {_FIELD: msgspec.json.encode(landed)}, maxlen=MOST_KEPT, approximate=True)
            both.expire(key, KEPT_S)
            await both.execute()


async def newest(client: Redis, namespace: str, stream: str) -> Landed | None:
    """Return the last one to have landed, None if there is none. Raises RegistryUnavailableError."""
    found = await _last(client, namespace, stream)
    return found[1] if found else None


async def end(client: Redis, namespace: str, stream: str) -> str:
    """Return the id after which nothing has landed yet; see `after`. Raises RegistryUnavailableError."""
    found = await _last(client, namespace, stream)
    return found[0] if found else START


async def after(
    client: Redis, namespace: str, stream: str, last_id: str = START, *, block_ms: int = LONGEST_BLOCK_MS
) -> list[tuple[str, Landed]]:
    """Return what has landed since `last_id`, oldest first, each with its id: the `last_id` of the next call.

    Waits for something to land, `block_ms` at most; 0 does not wait. Raises RegistryUnavailableError.
    """
    key = keys.checkpoints(namespace, stream)
    block = min(block_ms, LONGEST_BLOCK_MS) or None
    with unavailable_if_lost(client):
        found: Any = await client.xread({key: last_id}, block=block)
    return [_read(entry) for _, entries in found for entry in entries]


async def _last(client: Redis, namespace: str, stream: str) -> tuple[str, Landed] | None:
    with unavailable_if_lost(client):
        entries = await client.xrevrange(keys.checkpoints(namespace, stream), count=1)
    return _read(entries[0]) if entries else None


def _read(entry: Any) -> tuple[str, Landed]:
    entry_id, fields = entry
    return entry_id, msgspec.json.decode(fields[_FIELD], type=Landed)
