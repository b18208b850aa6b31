"""Events of saved checkpoints: published by the agent that wrote one, read by sensors and triggers.

Events are in *streams*. The job is given the name of its stream, so a stream can outlive the job: that of an Airflow
task continues from run to run. It lists what was saved; `CheckpointStore` lists what can still be loaded.
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
"""About so many events of a stream are kept."""

KEPT_S = 30 * 24 * 3600
"""How long a stream outlives its last checkpoint."""

MAX_BLOCK_MS = 1000
"""Most that `after` blocks: the client would take a longer wait for an outage of Redis."""

START = "0-0"
"""The id before all events of a stream."""

_FIELD = "saved"

log = get_logger(__name__)


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint.

    - `job`: the job that wrote it; `generation`, `step`, `epoch`: when in its training.
    - `url`: of the checkpoint itself, not of the folder of all checkpoints.
    - `metrics`: the last values given to `run.metrics`.
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


async def publish(client: Redis, namespace: str, stream: str, saved: SavedCheckpoint) -> None:
    """Add a checkpoint to the stream. Raises RegistryUnavailableError."""
    key = keys.checkpoints(namespace, stream)
    with unavailable_if_lost(client, key):
        async with client.pipeline(transaction=True) as both:
            both.xadd(key, {_FIELD: msgspec.json.encode(saved)}, maxlen=MAX_KEPT, approximate=True)
            both.expire(key, KEPT_S)
            await both.execute()


async def newest(
    client: Redis, namespace: str, stream: str, *, job: str = "", since: float = 0.0
) -> SavedCheckpoint | None:
    """Return the last checkpoint of `job` (of any job by default) saved at `since` (Unix seconds) or later, or None.

    Raises RegistryUnavailableError.
    """
    key = keys.checkpoints(namespace, stream)
    with unavailable_if_lost(client, key):
        entries: Any = await client.xrevrange(key)
    found = (_decode_entry(entry)[1] for entry in entries)
    return next((saved for saved in found if saved and job in ("", saved.job) and saved.at >= since), None)


async def end(client: Redis, namespace: str, stream: str) -> str:
    """Return the id of the stream's last event, for `after`. Raises RegistryUnavailableError."""
    key = keys.checkpoints(namespace, stream)
    with unavailable_if_lost(client, key):
        entries: Any = await client.xrevrange(key, count=1)
    return str(entries[0][0]) if entries else START


async def after(
    client: Redis, namespace: str, stream: str, last_id: str = START, *, block_ms: int = MAX_BLOCK_MS
) -> list[tuple[str, SavedCheckpoint | None]]:
    """Return the events after `last_id`, oldest first, each with its id: the `last_id` of the next call.

    An event that can't be read, as of another version, is None. Waits up to `block_ms` for an event; 0 does not wait.
    Raises RegistryUnavailableError.
    """
    key = keys.checkpoints(namespace, stream)
    block = min(block_ms, MAX_BLOCK_MS) or None
    with unavailable_if_lost(client, key):
        found: Any = await client.xread({key: last_id}, block=block)
    return [_decode_entry(entry) for _, entries in found for entry in entries]


def _decode_entry(entry: Any) -> tuple[str, SavedCheckpoint | None]:
    entry_id, fields = entry
    content = fields.get(_FIELD, "")
    try:
        return entry_id, _decoder.decode(content)
    except msgspec.DecodeError as error:
        log.warning("saved_checkpoint.unreadable", id=entry_id, content=content[:200], cause=str(error))
        return entry_id, None
