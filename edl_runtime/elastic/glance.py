"""A look at a job's trainers from outside, by whoever is no member and changes nothing: Airflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from edl_runtime.elastic.generation import Outcome
from edl_runtime.elastic.roll import index_of
from edl_runtime.store import keys
from edl_runtime.store.client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """What counts for a job's trainers now, or did last.

    - `members`: the instances of the generation that is up, by rank; empty while none is.
    - `stop`: why the job was asked to end, None if it was not.
    - `outcome`: how it has ended, None while it has not.
    """

    members: tuple[int, ...] = ()
    stop: str | None = None
    outcome: Outcome | None = None


async def glance(client: Redis, namespace: str, job: str) -> Glance | None:
    """Return what Redis knows of a job's trainers for a day after the last, None if nothing.

    Raises RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        found: Any = client.hmget(keys.group_state(namespace, job), ["run", "formed", "members", "stop", "outcome"])
        run, formed, members, stop, outcome = await found
    if run is None:
        return None
    return Glance(
        members=tuple(map(index_of, members.split())) if formed == "active" else (),
        stop=stop or None,
        outcome=msgspec.json.decode(outcome, type=Outcome) if outcome else None,
    )
