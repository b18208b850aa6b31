"""Events of saved checkpoints: published by the agent that wrote one, read by whoever waits for it.

A *stream* of them is named by whoever starts the job, so it can outlive the job: that of a DAG's task continues from
run to run. It says what was written when, not what can still be loaded: that is `CheckpointStore`'s to tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.store import keys
from edl_runtime.store.redis_client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

MAX_KEPT = 1000
"""So many of a stream are kept, or a few more."""

KEPT_S = 30 * 24 * 3600
"""How long a stream outlives its last checkpoint."""

MAX_BLOCK_MS = 1000
"""`after` blocks no longer, whatever it is asked: the client takes a longer silence for a Redis that is away."""

START = "0-0"
"""What every checkpoint of a stream has landed after."""

_FIELD = "landed"

log = get_logger(__name__)


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
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


_decoder = JsonDecoder(SavedCheckpoint)


async def publish(client: Redis, namespace: str, stream: str, landed: SavedCheckpoint) -> None:
    """Add a checkpoint to the stream. Raises RegistryUnavailableError."""
    key = keys.checkpoints(namespace, stream)
    with unavailable_if_lost(client):
        async with client.pipeline(transaction=True) as both:
            both.xadd(key, {_FIELD: msgspec.json.encode(landed)}, maxlen=MAX_KEPT, approximate=True)
            both.expire(key, KEPT_S)
            await both.execute()


async def newest(
    client: Redis, namespace: str, stream: str, *, job: str = "", since: float = 0.0
) -> SavedCheckpoint | None:
    """Return the last one to have landed, None if there is none.

    Of `job` alone, if one is named, and not complete before `since` (Unix seconds). Raises RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        entries: Any = await client.xrevrange(keys.checkpoints(namespace, stream))
    found = (_decode_entry(entry)[1] for entry in entries)
    return next((one for one in found if one and job in ("", one.job) and one.at >= since), None)


async def end(client: Redis, namespace: str, stream: str) -> str:
    """Return the id after which nothing has landed yet; see `after`. Raises RegistryUnavailableError."""
    with unavailable_if_lost(client):
        entries: Any = await client.xrevrange(keys.checkpoints(namespace, stream), count=1)
    return str(entries[0][0]) if entries else START


async def after(
    client: Redis, namespace: str, stream: str, last_id: str = START, *, block_ms: int = MAX_BLOCK_MS
) -> list[tuple[str, SavedCheckpoint | None]]:
    """Return what has landed since `last_id`, oldest first, each with its id: the `last_id` of the next call.

    None stands for what can't be read, as of another version: it is to be passed by. Waits for something to land,
    `block_ms` at most; 0 does not wait. Raises RegistryUnavailableError.
    """
    key = keys.checkpoints(namespace, stream)
    block = min(block_ms, MAX_BLOCK_MS) or None
    with unavailable_if_lost(client):
        found: Any = await client.xread({key: last_id}, block=block)
    return [_decode_entry(entry) for _, entries in found for entry in entries]


def _decode_entry(entry: Any) -> tuple[str, SavedCheckpoint | None]:
    entry_id, fields = entry
    content = fields.get(_FIELD, "")
    try:
        return entry_id, _decoder.decode(content)
    except msgspec.DecodeError as error:
        log.warning("landed.unreadable", id=entry_id, content=content[:200], cause=str(error))
        return entry_id, None
