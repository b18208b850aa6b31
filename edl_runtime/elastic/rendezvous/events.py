"""A job's events and status in Redis, for observers: Airflow, `edl events`, the monitor. Kept for a day."""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from edl_runtime.elastic.comm.agent_protocol import Gear
from edl_runtime.elastic.rendezvous.generation import JobOutcome, instance_index
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.store import keys
from edl_runtime.store.redis_client import malformed_if_unreadable, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

BLOCK_MS = 700
"""Longest single wait inside Redis; below the client's timeout."""

EventKind = Literal[
    "registered",
    "loading",
    "ready",
    "leaving",
    "left",
    "lost",
    "gone",
    "superseded",
    "finished",
    "suspected",
    "late",
    "forming",
    "active",
    "resumed",
    "restored",
    "waiting",
    "stop",
    "ended",
    "saved",
    "failed",
    "note",
]

log = get_logger(__name__)


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened.

    Of an instance's agent (`instance`): "registered", "loading", "ready", "leaving", "left", "gone" (its lease
    expired), "superseded" (started again), "finished", "lost" (its worker ended within a generation), "failed".

    Of a generation: "forming" with its members' instances by rank, gear and reason; "active" when all have entered,
    after `total_s`; "resumed" when all have finished a step in it, `total_s` after it was proposed; `pause_s` is then
    the longest that an instance was without a finished step, of those that trained in the last generation before it;
    None without any. Plain scripts report no steps, so never resume. "suspected": a member may be dead. "restored":
    Redis had lost it. "waiting": there is none yet, and why. "late": most instances renew their leases late, so all
    leases last longer.

    Of the job: "stop" was requested; it "ended" (`outcome`); a checkpoint was "saved"; a "note" of a worker.

    - `id`, `at`: the event's id in the stream, and its time in Unix seconds of Redis's clock.
    """

    kind: EventKind
    id: str = ""
    at: float = 0.0
    generation: int = 0
    instance: int | None = None
    members: tuple[int, ...] = ()
    gear: Gear | None = None
    reason: str = ""
    pause_s: float | None = None
    total_s: float | None = None
    step: int | None = None
    epoch: int | None = None
    url: str = ""
    outcome: str = ""
    metrics: dict[str, float] = {}

    def line(self) -> str:
        """Return this event as a line for people, in this machine's time zone."""
        when = dt.datetime.fromtimestamp(self.at, dt.UTC).astimezone()
        words = [
            f"instance {self.instance}" if self.instance is not None else "",
            f"instances {' '.join(map(str, self.members))}" if self.members else "",
            self.gear or "",
            self.outcome,
            "" if self.step is None else f"step {self.step}",
            "" if self.epoch is None else f"epoch {self.epoch}",
            *(f"{name} {value:.4g}" for name, value in self.metrics.items()),
            "" if self.pause_s is None else f"pause {self.pause_s:.2f} s",
            "" if self.total_s is None else f"total {self.total_s:.2f} s",
            self.url,
            self.reason,
        ]
        number = str(self.generation) if self.generation else "-"
        text = " · ".join(word for word in words if word)
        return f"{when:%H:%M:%S}.{when.microsecond // 1000:03d}  {number:>4}  {self.kind:<10}  {text}".rstrip()


_decoder = JsonDecoder(Event)


async def read(client: Redis, namespace: str, job: str, *, after: str = "-") -> list[Event]:
    """Return the job's events, oldest first; only those after the event with id `after`, if given.

    Raises RegistryUnavailableError.
    """
    start = after if after == "-" else f"({after}"
    with unavailable_if_lost(client):
        entries: Any = await client.xrange(keys.group_events(namespace, job), min=start)
    return _decode_events(entries)


async def follow(
    client: Redis, namespace: str, job: str, *, after: str = "0-0", deserted_s: float = math.inf
) -> AsyncGenerator[Event, None]:
    """Yield the job's events so far, or after the one with id `after`, and then each as it happens; close it when done.

    Ends once nothing has happened and no agent has been alive for `deserted_s`; by default never. Continues in a Redis
    that was emptied. Raises RegistryUnavailableError; with `deserted_s` MalformedRecordError.
    """
    stream = keys.group_events(namespace, job)
    last, there_at = after, time.monotonic()
    while time.monotonic() < there_at + deserted_s:
        with unavailable_if_lost(client):
            answer: Any = await client.xread({stream: last}, count=100, block=BLOCK_MS)
        if answer or deserted_s == math.inf or await has_live_agents(client, namespace, job):
            there_at = time.monotonic()
        for _, entries in answer:
            last = entries[-1][0]
            for event in _decode_events(entries):
                yield event


def _decode_events(entries: list[tuple[str, dict[str, str]]]) -> list[Event]:
    events = []
    for entry_id, fields in entries:
        content = fields.get("event", "")
        try:
            event = _decoder.decode(content)
        except msgspec.DecodeError as error:  # written by another version
            log.warning("event.skipped", content=content[:200], cause=str(error))
            continue
        events.append(msgspec.structs.replace(event, id=entry_id, at=int(entry_id.partition("-")[0]) / 1000))
    return events


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The present, or last, state of a job's group.

    - `members`: the instances of the active generation, by rank; empty without one.
    - `stop`: why the job was asked to end, None if it was not.
    - `outcome`: how it has ended, None while it has not.
    - `heard_at`: time of the last heartbeat, in Unix seconds of Redis's clock.
    """

    members: tuple[int, ...] = ()
    stop: str | None = None
    outcome: JobOutcome | None = None
    heard_at: float = 0.0


SILENT_S = 2.0
"""Agents send several heartbeats a second.

The group's clock stops without them, so leases alone don't show that all are gone."""


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


async def group_status(client: Redis, namespace: str, job: str) -> GroupStatus | None:
    """Return what Redis knows of a job's group, None if nothing; it is kept for a day.

    Raises MalformedRecordError, RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        key, fields = keys.group_state(namespace, job), ["run", "formed", "members", "stop", "outcome", "wall"]
        found: Any = client.hmget(key, fields)
        state = {field: value for field, value in zip(fields, await found, strict=True) if value is not None}
    if "run" not in state:
        return None
    with malformed_if_unreadable(key):
        return GroupStatus(
            members=tuple(map(instance_index, state["members"].split())) if state.get("formed") == "active" else (),
            stop=state.get("stop") or None,
            outcome=JsonDecoder(JobOutcome).decode(state["outcome"]) if state.get("outcome") else None,
            heard_at=int(state["wall"]) / 1000,
        )
