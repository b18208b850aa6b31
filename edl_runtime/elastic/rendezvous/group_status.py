"""The present, or last, state of a job's group in Redis, for observers: Airflow, `edl jobs`, the monitor.

It is kept for a day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.elastic.comm.agent_protocol import Gear
from edl_runtime.elastic.rendezvous.generation import JobOutcome, instance_index
from edl_runtime.parsing import JsonDecoder
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError
from edl_runtime.store.redis_client import malformed_if_unreadable, readable, run_script_on_each, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

SILENT_S = 2.0
"""Agents send several heartbeats a second.

The group's clock stops without them, so leases alone don't show that all are gone."""


class LastCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The last checkpoint that this run of a job has written, `at` a time in Unix seconds of Redis's clock."""

    step: int
    epoch: int = 0
    generation: int = 0
    url: str = ""
    at: float = 0.0


class LastResize(msgspec.Struct, frozen=True, kw_only=True):
    """The last change of a group's members after which all have trained on; also one that leaves their number as it is.

    - `before`, `after`: how many trained together. `at`: Unix seconds of Redis's clock.
    - `pause_s`: how long training paused, None if unknown. `total_s`: since the generation was proposed.
    - `gear`: how it was entered, None if unknown. `reason`: why.
    """

    before: int
    after: int
    at: float
    gear: Gear | None = None
    reason: str = ""
    pause_s: float | None = None
    total_s: float = 0.0


class LastFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The last worker that failed, at a step of the job: of which instance, and why.

    `count`: so many failed without a later step in between. `reason`: empty for plain scripts, which report no steps,
    and of agents of an earlier version.
    """

    step: int
    instance: int = 0
    count: int = 0
    reason: str = ""


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The present, or last, state of a job's group.

    - `members`: the instances of the active generation, by rank; empty without one.
    - `generation`: the number of the current one, 0 before the first. `forming`: its members have yet to enter it.
    - `waits`: why there is no next generation, as last reported; empty once there is one.
    - `stop`: why the job has to end, None if it has not. `outcome`: how it has ended, None while it has not.
    - `stragglers`: how many times as long as its peers an instance computes that has been slower for long.
    - `heard_at`: time of the last heartbeat, in Unix seconds of Redis's clock; `read_at`: when this was read, likewise.
    """

    members: tuple[int, ...] = ()
    generation: int = 0
    forming: bool = False
    waits: str = ""
    stop: str | None = None
    outcome: JobOutcome | None = None
    stragglers: dict[int, float] = {}
    heard_at: float = 0.0
    read_at: float = 0.0
    checkpoint: LastCheckpoint | None = None
    resize: LastResize | None = None
    failure: LastFailure | None = None


FIELDS = (
    "run", "formed", "members", "outcome", "wall", "current", "waits", "stop", "saved", "saved_at", "resized", "slow",
    "failures",
)  # fmt: skip
"""The fields of the group's state that a status is made of."""

MOST_BYTES = 1 << 20
"""Of these fields; those that do not fit in count as missing."""

# made at import: msgspec crashes when several threads are the first to decode a type
_outcome_decoder = JsonDecoder(JobOutcome)
_checkpoint_decoder = JsonDecoder(LastCheckpoint)
_resize_decoder = JsonDecoder(LastResize)
_failure_decoder = JsonDecoder(LastFailure)


async def group_status(client: Redis, namespace: str, job: str) -> GroupStatus | None:
    """Return what Redis knows of a job's group, None if nothing.

    Raises MalformedRecordError, RegistryUnavailableError.
    """
    return readable((await group_statuses(client, namespace, [job])).get(job))


async def group_statuses(
    client: Redis, namespace: str, jobs: Sequence[str]
) -> dict[str, GroupStatus | MalformedRecordError]:
    """Return what Redis knows of these jobs' groups, by name, or why it can't be read; unknown ones are left out.

    One round trip. Raises RegistryUnavailableError.
    """
    groups = [keys.group_keys(namespace, job) for job in jobs]
    answers = await run_script_on_each(client, "group_status", groups, [MOST_BYTES, *FIELDS])
    found: dict[str, GroupStatus | MalformedRecordError] = {}
    for job, answer in zip(jobs, answers, strict=True):
        if isinstance(answer, MalformedRecordError):
            found[job] = answer
            continue
        now_s, *values = answer
        state = {field: value for field, value in zip(FIELDS, values, strict=True) if value is not None}
        if "run" in state:
            try:
                found[job] = _status(keys.group_state(namespace, job), state, int(now_s))
            except MalformedRecordError as error:
                found[job] = error
    return found


def _status(key: str, state: Mapping[str, str], now_s: float) -> GroupStatus:
    with malformed_if_unreadable(key):
        saved = _checkpoint_decoder.decode(state["saved"]) if "saved" in state else None
        saved_at = int(state.get("saved_at", 0)) / 1000
        members = state["members"].split() if state.get("formed") == "active" else []
        slow = [one.rpartition("=") for one in state.get("slow", "").split() if len(members) > 1]
        return GroupStatus(
            members=tuple(map(instance_index, members)),
            stragglers={instance_index(one): float(times) for one, _, times in slow if one in members},
            generation=int(state.get("current", 0)),
            forming=state.get("formed") == "forming",
            waits=state.get("waits", ""),
            stop=state.get("stop"),
            outcome=_outcome_decoder.decode(state["outcome"]) if state.get("outcome") else None,
            heard_at=int(state["wall"]) / 1000,
            read_at=now_s,
            checkpoint=msgspec.structs.replace(saved, at=saved_at) if saved else None,
            resize=_resize_decoder.decode(state["resized"]) if "resized" in state else None,
            failure=_failure_decoder.decode(state["failures"]) if "failures" in state else None,
        )


async def has_live_agents(client: Redis, namespace: str, job: str) -> bool:
    """Return whether an agent of the job is registered, and has sent a heartbeat lately.

    Raises MalformedRecordError, RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        async with client.pipeline(transaction=True) as asked:
            asked.exists(keys.group_keys(namespace, job)[0])
            asked.hget(keys.group_state(namespace, job), "wall")
            asked.time()
            registered, wall_ms, (now_s, _) = await asked.execute()
    with malformed_if_unreadable(keys.group_state(namespace, job)):
        heard_at = int(wall_ms or 0) / 1000
    return bool(registered) and abs(now_s - heard_at) < SILENT_S  # Redis's clock may have been set back
