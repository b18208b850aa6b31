"""The rendezvous of a job in Redis: agents register, see all members and change the group; others read its events.

Each change is one Lua script, so it is atomic; a change that a script refuses has been made by another agent.
Decisions are made in `planner`.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import math
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from edl_runtime.elastic.comm.agent_protocol import Gear
from edl_runtime.elastic.errors import InstanceSupersededError, JobTakenError
from edl_runtime.elastic.rendezvous.generation import (
    Generation,
    GroupView,
    JobOutcome,
    MemberLease,
    Suspicion,
    TrainerMember,
)
from edl_runtime.elastic.rendezvous.group_status import has_live_agents
from edl_runtime.errors import clipped
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError
from edl_runtime.store.redis_client import (
    UNREADABLE,
    malformed,
    malformed_if_unreadable,
    run_script,
    run_script_on_each,
    unavailable_if_lost,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

HEARTBEAT_EVERY_S = 0.25
"""How often an agent of a small group sends a heartbeat, besides at once on a change of its member or an event."""
MAX_HEARTBEAT_EVERY_S = 0.5
"""The same in a large group; a lease lasts six times as long."""
HEARTBEATS_PER_S = 128
"""Where all together would send more, each sends fewer."""
RETRY_EVERY_S = 0.25
"""How often it retries while Redis is unavailable. All agents return within this, before anything is decided."""
QUIET_S = 1.0
"""For so long nothing is decided in a Redis that was empty: agents may restore the highest generation."""
POLL_EVERY_S = 0.1
"""How often to check whether another submission's instances are dead."""
MOST_BYTES = 256 << 10
"""Of the last events of a job that are read together with others'; those that do not fit in are left out."""
BLOCK_S = 1.0
"""Longest single wait inside Redis; below the client's timeout."""

log = get_logger(__name__)


class _Beat(msgspec.Struct):
    """A member's last heartbeat, as the script stores it; times in ms."""

    fence: int
    at: int
    since: int


# made at import: msgspec crashes when several threads are the first to decode a type
_member_decoder = JsonDecoder(TrainerMember)
_beat_decoder = JsonDecoder(_Beat)
_generation_decoder = JsonDecoder(Generation)
_outcome_decoder = JsonDecoder(JobOutcome)
_group_decoder = JsonDecoder(list[list[str]])
_NO_UTF8 = re.compile(r"(?<!\\)((?:\\\\)*)\\x")
"""How the client shows bytes that are no UTF-8, in texts inside JSON, which has no such escape."""


class RendezvousStore:
    """One agent's part in the group of `job`. It keeps its fence, and the last view.

    `run`: an id that all instances of one submission of the job share: so a job that is submitted again is not taken
    for one that has ended. Where it is "", as with jobs started by hand, the first agent to register where none is
    alive restarts an ended job.
    """

    def __init__(
        self,
        client: Redis,
        namespace: str,
        job: str,
        *,
        run: str = "",
        ttl_s: float = 3.0,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._client = client
        self._job = job
        self._group = keys.group_keys(namespace, job)
        self._job_run = run
        self._ttl_ms = _ms(ttl_s)
        self._quiet_ms = _ms(quiet_s)
        self._id = ""
        self._fence = 0
        self._seen = GroupView(now=0.0)
        self._unreadable: Mapping[str, MalformedRecordError] = {}

    async def heartbeat(self, member: TrainerMember) -> GroupView:
        """Register, or renew the lease and replace the record; return the whole group.

        A Redis that is empty, or older than the last view, gets the generation back from that view, and leases for its
        members, so that none counts as dead. A member whose record can't be read keeps its lease until its next
        heartbeat replaces the record; that is logged once. Registering waits for another submission's leases to expire,
        however long they last: its instances may be dead.

        Raises InstanceSupersededError when a later agent has this instance's number, JobTakenError when another
        submission of the job is alive, MalformedRecordError when the group's own record can't be read,
        RegistryUnavailableError.
        """
        self._id = member.id
        answer = await self._heartbeat(member)
        asked_at = time.monotonic()
        while answer[0] == "taken" and not self._fence and time.monotonic() < asked_at + 1.5 * _s(answer[1]):
            await asyncio.sleep(POLL_EVERY_S)  # its instances may all be dead
            answer = await self._heartbeat(member)
        if answer[0] == "superseded":
            raise InstanceSupersededError(self._job, member.index)
        if answer[0] == "taken":
            raise JobTakenError(self._job)
        _, self._fence, now_ms, group = answer
        if r"\x" in group:
            group = _NO_UTF8.sub(r"\1\\\\x", group)
        parts = _group_decoder.decode(group)
        state, leases, *of_members = (dict(zip(part[::2], part[1::2], strict=True)) for part in parts)
        present, unreadable = _present(self._group, leases, *of_members)
        for each in unreadable.keys() - self._unreadable.keys():
            log.warning("member.unreadable", member=each, key=unreadable[each].key, cause=unreadable[each].cause)
        self._unreadable = unreadable
        with malformed_if_unreadable(self._group[3]):
            self._seen = _view(now_ms, state, leases, present)
        return self._seen

    async def propose(self, draft: Generation) -> Generation | None:
        """Publish `draft` as the next generation and return it with its number; None when it is out of date.

        That is when there has been another since the last `heartbeat`, when this agent or a member of the draft has no
        lease or is not ready, and when the job has ended. Raises RegistryUnavailableError.
        """
        _, rest = msgspec.json.encode(draft).decode().split(",", 1)  # the number comes first
        members = " ".join(draft.members)
        published = await self._run("propose", draft.after, rest, members, draft.gear, draft.reason)
        return _generation_decoder.decode(published) if published else None

    async def suspect(self, generation: int, reason: str) -> bool:
        """Report that a member of `generation` may be dead; each has to send a heartbeat to count as alive.

        False when that is not the current generation, or it was reported before. Raises RegistryUnavailableError.
        """
        return bool(await self._run("suspect", generation, reason))

    async def leave(self) -> None:
        """End this agent's lease, after its worker. Raises RegistryUnavailableError."""
        await self._run("leave")

    async def end(self, outcome: JobOutcome) -> None:
        """Set how the job has ended; the first outcome counts. Raises RegistryUnavailableError."""
        await self._run("end", msgspec.json.encode(outcome).decode(), outcome.kind, outcome.reason)

    async def count_failure(self, generation: int, step: int, *, progress: bool, reason: str = "") -> int:
        """Return how many workers of the job have failed without progress in between, this one included.

        `generation`: the one assigned to it, 0 for none. `step`: the job's; one above that of all failures before is
        progress, and so is `progress` itself. `reason`: why, for the group's status.

        Raises RegistryUnavailableError.
        """
        return int(await self._run("failure", generation, step, int(progress), clipped(reason)))

    async def announce(self, event: Event) -> bool:
        """Add to the job's events, and return True; "waiting" and "saved" only when the last such event was another.

        Raises RegistryUnavailableError.
        """
        return bool(await self._run("announce", *_announced(event)))

    async def _heartbeat(self, member: TrainerMember) -> Any:
        seen = self._seen
        known = {
            "clock": round(seen.now * 1000),
            "highest": seen.number,
            "generation": msgspec.json.encode(seen.generation).decode() if seen.generation else "",
            "finished": " ".join(sorted(seen.finished)),
            "left": " ".join(sorted(seen.left)),
            **({"stop": seen.stop} if seen.stop else {}),
            **({"outcome": msgspec.json.encode(seen.outcome).decode()} if seen.outcome else {}),
        }
        given = {
            "quiet_ms": self._quiet_ms,
            "member": msgspec.json.encode(member).decode(),
            "status": member.status,
            "run": self._job_run,
            "known": known,
        }
        return await self._run("heartbeat", msgspec.json.encode(given).decode())

    async def _run(self, script: str, *args: str | int) -> Any:
        head: list[str | int] = [self._id, self._fence, self._ttl_ms]
        return await run_script(self._client, f"group_{script}", self._group, [*head, *args])


def _view(
    now_ms: int,
    state: Mapping[str, str],
    leases: Mapping[str, str],
    present: Mapping[str, MemberLease],
) -> GroupView:
    generation = _generation_decoder.decode(state["generation"]) if "generation" in state else None
    suspicion = None
    if generation and "suspected_at" in state:
        suspicion = Suspicion(
            generation=generation.number,
            by=state["suspected_by"],
            reason=state["suspected_for"],
            since=_s(state["suspected_at"]),
        )
    return GroupView(
        now=_s(now_ms),
        members=tuple(sorted(present.values(), key=lambda each: each.member.fence)),
        granted={each: _s(deadline) for each, deadline in leases.items() if each not in present},
        number=int(state["number"]),
        generation=generation,
        state="active" if state.get("formed") == "active" else "forming",
        since=_s(state.get("since", 0)),
        resumed="resumed" in state,
        stretch=1 + int(state["overtime"]) / int(state["ttl"]),
        finished=frozenset(state.get("finished", "").split()),
        left=frozenset(state.get("left", "").split()),
        suspicion=suspicion,
        stop=state.get("stop"),
        outcome=_outcome_decoder.decode(state["outcome"]) if "outcome" in state else None,
        checkpoint_asked=int(state.get("checkpoint_asked", 0)),
        checkpoint_asked_in=int(state.get("checkpoint_asked_in", 0)),
        checkpoint_answered=int(state.get("checkpoint_answered", 0)),
        quiet_until=_s(state["quiet_until"]),
    )


def _present(
    group: Sequence[str], leases: Mapping[str, str], records: Mapping[str, str], beats: Mapping[str, str]
) -> tuple[dict[str, MemberLease], dict[str, MalformedRecordError]]:
    """Return the members by id, and why those can't be read that are not among them. `group`: the keys."""
    present, unreadable = {}, {}
    for each, record in records.items():
        key = group[0]
        try:
            deadline = _s(leases[each])
            key = group[1]
            member = _member_decoder.decode(record)
            key = group[2]
            beat = _beat_decoder.decode(beats[each])
            present[each] = MemberLease(
                member=msgspec.structs.replace(member, fence=beat.fence),
                deadline=deadline,
                heartbeat_at=_s(beat.at),
                since=_s(beat.since),
            )
        except UNREADABLE as error:
            unreadable[each] = malformed(key, error)
    return present, unreadable


def next_heartbeat(due: float, now: float, members: int) -> float:
    """Return when an agent of a group of so many sends a heartbeat after the present one, which was due at `due`.

    An agent keeps to moments of its own, or after an event all would send at the same ones. It omits a moment that
    comes too soon after an event.
    """
    every_s = min(max(HEARTBEAT_EVERY_S, members / HEARTBEATS_PER_S), MAX_HEARTBEAT_EVERY_S)
    return due + every_s * max(0, math.ceil((now - due) / every_s + 0.5))


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _s(ms: str | float) -> float:
    return float(ms) / 1000


# Events, for observers: Airflow, `edl events`. Kept for a day.

EventKind = Literal[
    "registered", "loading", "ready", "leaving", "left", "lost", "gone", "superseded", "finished", "failed",
    "suspected", "late", "forming", "active", "resumed", "restored", "waiting", "asked", "stop", "ended", "saved",
    "note", "straggler", "orphan",
]  # fmt: skip


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened.

    Of an instance's agent (`instance`): "registered", "loading", "ready", "leaving", "left", "gone" (its lease
    expired), "superseded" (started again), "finished", "lost" (its worker ended within a generation), "failed",
    "straggler" (it computes longer than its peers).

    Of a generation: "forming" with its members' instances by rank, gear and reason; "active" when all have entered,
    after `total_s`; "resumed" when all have finished a step in it, `total_s` after it was proposed; `pause_s` is then
    the longest that an instance was without a finished step, of those that trained in the last generation before it;
    None without any. Plain scripts report no steps, so never resume. "suspected": a member may be dead. "restored":
    Redis had lost it. "waiting": there is none yet, and why. "late": most instances renew their leases late, so all
    leases last longer.

    Of the job: "stop" was requested; it was "asked" for a checkpoint; it "ended" (`outcome`); a checkpoint was "saved";
    a "note" of a worker; it is an "orphan", whose task has left it. `request`: the number of the request that the
    checkpoint answers, or why there is none.

    - `id`, `at`: the event's id in the stream, and its time in Unix seconds of Redis's clock.
    - `delay_s`: how much later Redis was told of it, as after an outage; 0 for less than a second.
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
    request: int = 0
    delay_s: float = 0.0

    def line(self) -> str:
        """Return this event as a line for people, in this machine's time zone."""
        when = dt.datetime.fromtimestamp(self.at, dt.UTC).astimezone()
        number = str(self.generation) if self.generation else "-"
        return f"{when:%H:%M:%S}.{when.microsecond // 1000:03d}  {number:>4}  {self.kind:<10}  {self.text()}".rstrip()

    def text(self) -> str:
        """Return what this event says beside its time, generation and kind."""
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
        return " · ".join(word for word in words if word)


_event_decoder = JsonDecoder(Event)


async def read_events(client: Redis, namespace: str, job: str, *, after: str = "-") -> list[Event]:
    """Return the job's events, oldest first; only those after the event with id `after`, if given.

    Raises RegistryUnavailableError.
    """
    start = after if after == "-" else f"({after}"
    key = keys.group_events(namespace, job)
    with unavailable_if_lost(client, key):
        entries: Any = await client.xrange(key, min=start)
    return _decode_events(entries)


async def announce(client: Redis, namespace: str, job: str, event: Event) -> None:
    """Add to the job's events what somebody else than its agents has seen. Raises RegistryUnavailableError."""
    nobody: list[str | int] = ["", 0, 0]
    await run_script(client, "group_announce", keys.group_keys(namespace, job), [*nobody, *_announced(event)])


def _announced(event: Event) -> list[str | int]:
    """Return the script's arguments. An event that is told again has the same text, how late it ever is."""
    text = msgspec.json.encode(msgspec.structs.replace(event, id="", at=0.0, delay_s=0.0)).decode()
    return [text, event.kind, event.reason, event.request, round(1000 * event.delay_s)]


async def last_events(
    client: Redis, namespace: str, jobs: Sequence[str], *, most: int
) -> dict[str, list[Event] | MalformedRecordError]:
    """Return the last events of each of these jobs, oldest first, in one round trip; of MOST_BYTES at most.

    Of a job whose key holds something else the error is returned. Raises RegistryUnavailableError.
    """
    groups = [keys.group_keys(namespace, job) for job in jobs]
    answers = await run_script_on_each(client, "group_events", groups, [most, MOST_BYTES])
    return {
        job: answer
        if isinstance(answer, MalformedRecordError)
        else _decode_events([(entry_id, {"event": content}) for entry_id, content in reversed(answer)])
        for job, answer in zip(jobs, answers, strict=True)
    }


async def last_event_id(client: Redis, namespace: str, job: str) -> str:
    """Return the id of the job's last event, "0-0" without one: what happens from now on comes after it.

    Raises RegistryUnavailableError.
    """
    key = keys.group_events(namespace, job)
    with unavailable_if_lost(client, key):
        entries: Any = await client.xrevrange(key, count=1)
    return str(entries[0][0]) if entries else "0-0"


async def follow_events(
    client: Redis, namespace: str, job: str, *, after: str = "0-0", deserted_s: float = math.inf
) -> AsyncGenerator[Event, None]:
    """Yield the job's events so far, or after the one with id `after`, and then each as it happens; close it when done.

    Ends once nothing has happened and no agent has been alive for `deserted_s`; by default never. Continues in a Redis
    that was emptied. Raises RegistryUnavailableError; with `deserted_s` MalformedRecordError.
    """
    stream = keys.group_events(namespace, job)
    last, there_at = after, time.monotonic()
    while time.monotonic() < there_at + deserted_s:
        with unavailable_if_lost(client, stream):
            answer: Any = await client.xread({stream: last}, count=100, block=round(BLOCK_S * 1000))
        if answer or deserted_s == math.inf or await has_live_agents(client, namespace, job):
            there_at = time.monotonic()
        for _, entries in answer:
            last = entries[-1][0]
            for event in _decode_events(entries):
                yield event


_LAST_TIME = dt.datetime(9999, 1, 1, tzinfo=dt.UTC).timestamp()


def _decode_events(entries: list[tuple[str, dict[str, str]]]) -> list[Event]:
    events = []
    for entry_id, fields in entries:
        content = fields.get("event", "")
        try:
            event = _event_decoder.decode(content)
        except msgspec.DecodeError as error:  # written by another version
            log.warning("event.skipped", content=content[:200], cause=str(error))
            continue
        told_at = int(entry_id.partition("-")[0]) / 1000
        at = min(max(told_at - event.delay_s, 0.0), _LAST_TIME)  # who writes an entry may choose both
        events.append(msgspec.structs.replace(event, id=entry_id, at=at))
    return events
