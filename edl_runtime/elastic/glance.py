"""A look at a job's trainers from outside, by whoever is no member and changes nothing: Airflow, `edl events`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from edl_runtime.decoding import Decoder
from edl_runtime.elastic.generation import Outcome
from edl_runtime.elastic.roll import index_of
from edl_runtime.store import keys
from edl_runtime.store.client import unavailable_if_lost
from edl_runtime.store.records import has_to_be_readable

if TYPE_CHECKING:
    from redis.asyncio import Redis


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """What counts for a job's trainers now, or did last.

    - `members`: the instances of the generation that is up, by rank; empty while none is.
    - `stop`: why the job was asked to end, None if it was not.
    - `outcome`: how it has ended, None while it has not.
    - `heard_at`: when they were last heard of, in Unix seconds of Redis's clock.
    """

    members: tuple[int, ...] = ()
    stop: str | None = None
    outcome: Outcome | None = None
    heard_at: float = 0.0


SILENT_S = 2.0
"""Agents beat several times a second; leases by a clock that goes on with their beats alone never run out by itself."""


async def is_anybody_there(client: Redis, namespace: str, job: str) -> bool:
    """Return whether an agent of the job is registered, and has beaten lately.

    Raises MalformedRecordError, RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        async with client.pipeline(transaction=True) as asked:
            asked.exists(keys.of_group(namespace, job)[0])
            asked.hget(keys.group_state(namespace, job), "wall")
            asked.time()
            registered, wall_ms, (now_s, _) = await asked.execute()
    with has_to_be_readable(keys.group_state(namespace, job)):
        heard_at = int(wall_ms or 0) / 1000
    return bool(registered) and abs(now_s - heard_at) < SILENT_S  # Redis's clock may have been set back


async def glance(client: Redis, namespace: str, job: str) -> Glance | None:
    """Return what Redis knows of a job's trainers for a day after the last, None if nothing.

    Raises MalformedRecordError, RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        key, fields = keys.group_state(namespace, job), ["run", "formed", "members", "stop", "outcome", "wall"]
        found: Any = client.hmget(key, fields)
        state = {field: value for field, value in zip(fields, await found, strict=True) if value is not None}
    if "run" not in state:
        return None
    with has_to_be_readable(key):
        return Glance(
            members=tuple(map(index_of, state["members"].split())) if state.get("formed") == "active" else (),
            stop=state.get("stop") or None,
            outcome=Decoder(Outcome).decode(state["outcome"]) if state.get("outcome") else None,
            heard_at=int(state["wall"]) / 1000,
        )
