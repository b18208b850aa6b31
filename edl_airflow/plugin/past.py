"""The last day of a connection for the timeline: read in parts, as others add to it."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from edl_airflow.client import EdlClient
from edl_airflow.identity import is_own_name
from edl_airflow.plugin.live import Seen
from edl_airflow.plugin.runs import JobRun
from edl_runtime.autoscale.history import SAME_AFTER_MS, HistoryPoint, owner_mark, read_points
from edl_runtime.autoscale.outlook import past_spans
from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import JobStatus, token_owner
from edl_runtime.elastic.rendezvous.redis_store import Event, last_events
from edl_runtime.errors import counted
from edl_runtime.monitor.timeline import HistorySegment, segments_of, spans, state_of
from edl_runtime.store.errors import MalformedRecordError, RegistryError

DAY_S = 24 * 3600.0
MOST_POINTS = 500
"""Of a series."""

MOST_MARKS = 500
MOST_JOBS = 200
"""Jobs whose events are read, the last ones by name being left out."""

EVENTS_OF_JOB = 100

READ_EVERY_S = 15.0

LAST_S = SAME_AFTER_MS / 1000
"""A removed job's last events may be so much later than its last point."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """From when to when, in Unix seconds, what is kept by a job's name is its `owner`'s (empty for nobody)."""

    owner: str
    since: float
    until: float = math.inf

    def has(self, at: float) -> bool:
        """Whether what happened then was this job's."""
        return self.since <= at <= self.until


def life_of(job: JobStatus) -> Life:
    """Return the life of a job that is there."""
    run = JobRun(job=job.name, owner=token_owner(job.token), created_at=job.created_at)
    return Life(owner=run.owner, since=run.since)


class PastReader:
    """Reads the points of a connection's last day. Belongs to one event loop.

    `version`: another one whenever points were read.
    """

    def __init__(self) -> None:
        self.version = 0
        self._points: list[HistoryPoint] = []
        self._stays: Mapping[str, Stay] = {}
        self._removed: dict[str, tuple[Stay, Life | None]] = {}
        self._read_at = -READ_EVERY_S
        self._lock = asyncio.Lock()
        self._failure: tuple[float, RegistryError | None] = (0.0, None)

    async def points(self, client: EdlClient) -> Sequence[HistoryPoint]:
        """Return the points of the last day; only new ones are read from Redis. Raises RegistryUnavailableError.

        Those who wait for one reading share its failure, too: a Redis that hangs is asked once for all of them.
        """
        asked_at = time.monotonic()
        async with self._lock:
            failed_at, failure = self._failure
            if failure and failed_at >= asked_at:
                raise failure
            if time.monotonic() > self._read_at + READ_EVERY_S:
                try:
                    await self._read(client)
                except RegistryError as error:
                    self._failure = (time.monotonic(), error)
                    raise
                self._read_at = time.monotonic()
            return self._points

    async def _read(self, client: EdlClient) -> None:
        now = time.time()
        last = self._points[-1].at if self._points else now - DAY_S
        new = await read_points(client.redis, client.namespace, client.backend.place, since=last)
        kept = [point for point in self._points if point.at > now - DAY_S]
        points = [*kept, *(point for point in new if not self._points or point.at > last)]
        self._stays = await asyncio.to_thread(last_stays, points)
        self._points = points
        self.version += 1

    async def removed(self, client: EdlClient, there: Collection[str]) -> dict[str, Life]:
        """Return the lives of jobs and pools of the last day that are not `there` any more, by name.

        Those of which no log is kept are left out, and of many, the last ones by name. Raises BackendError.
        """
        names = sorted(self._stays.keys() - set(there))[:MOST_JOBS]
        lives = {name: await self.removed_job(client, name) for name in names}
        self._removed = {name: kept for name, kept in self._removed.items() if name in lives}
        return {name: life for name, life in lives.items() if life}

    async def removed_job(self, client: EdlClient, name: str) -> Life | None:
        """Return the life of a job of the last day, None if there are no points or no log of its last owner.

        Raises BackendError.
        """
        stay = self._stays.get(name)
        if stay is None:
            return None
        known, life = self._removed.get(name, (None, None))
        if known != stay:
            life = await _life_of_removed(client, name, stay)
            self._removed[name] = (stay, life)
        return life


class Stay(msgspec.Struct, frozen=True):
    """The first and the last point of a job's last owner, who is named by `owner_mark`."""

    mark: str
    first: float
    last: float


def last_stays(points: Iterable[HistoryPoint]) -> dict[str, Stay]:
    """Return the stays of all jobs. Pure."""
    found: dict[str, Stay] = {}
    for point in points:
        for name, job in point.jobs.items():
            known = found.get(name)
            first = known.first if known and known.mark == job.owner else point.at
            found[name] = Stay(job.owner, first, point.at)
    return found


async def _life_of_removed(client: EdlClient, name: str, stay: Stay) -> Life | None:
    try:
        owner = await client.backend.owner(name)
    except UnknownJobError:
        return None
    if is_own_name(owner, name):
        return Life(owner=owner, since=0.0)
    return Life(owner=owner, since=stay.first, until=stay.last + LAST_S) if owner_mark(owner) == stay.mark else None


async def events_of(client: EdlClient, jobs: Mapping[str, Life]) -> dict[str, list[Event]]:
    """Return the last events of trainers, none of those that can't be read. Raises RegistryUnavailableError."""
    found = await last_events(client.redis, client.namespace, sorted(jobs)[:MOST_JOBS], most=EVENTS_OF_JOB)
    return {
        name: [event for event in happened if jobs[name].has(event.at)]
        for name, happened in found.items()
        if not isinstance(happened, MalformedRecordError)
    }


def timeline(
    points: Sequence[HistoryPoint],
    events: Mapping[str, Sequence[Event]],
    seen: Seen,
    names: Mapping[str, Life],
    now: float,
) -> dict[str, Any]:
    """Return the answer of `timeline` about these jobs and pools, by name. Pure."""
    since = now - DAY_S
    past = segments_of(points, since=since, until=now)
    ats = [one.point.at for one in past]
    windows = seen.done.rules.windows if seen.done and seen.done.rules else None
    there = {
        name: point.kind
        for one in past
        for name, point in one.point.jobs.items()
        if name in names and names[name].has(one.point.at)
    }
    held = [
        {"name": span.what, "start": span.start, "end": span.end, "ahead": False, "allowed": ""}
        for span in spans(past, lambda point: point.window)
    ]
    if windows:
        held = [
            {
                "name": span.name,
                "start": max(since, span.start.timestamp()) if span.start else since,
                "end": min(now, span.end.timestamp()) if span.end else now,
                "ahead": False,
                "allowed": _sizes(span.sizes.cluster),
            }
            for span in past_spans(windows, since=since, until=now)
        ]
    expected = seen.expected
    coming = [{"name": one.name, "start": one.at, "end": one.end, "ahead": True, "allowed": ""} for one in expected]
    traffic = [point.traffic for point in points if point.traffic]
    return {
        "since": since,
        "until": now,
        "ahead_until": max((one.end or one.at for one in expected), default=now),
        "series": [
            {
                "name": name,
                "kind": kind,
                "points": _thinned(_running(own, name)),
                "states": [
                    [span.start, span.end, span.what] for span in spans(own, state_of(name)) if span.what != "running"
                ],
                "ahead": [[one.at, one.targets[name]] for one in expected if name in one.targets],
            }
            for name, kind in sorted(there.items())
            for own in (past[bisect_left(ats, names[name].since) :],)
        ],
        "windows": [*held, *coming],
        "traffic": {
            "unit": traffic[-1].resource,
            "points": _thinned([[at, needed] for at, needed in {one.at: one.needed for one in traffic}.items()]),
        }
        if traffic
        else None,
        "marks": sorted(_marks(events, names, since), key=lambda mark: float(mark["at"]))[-MOST_MARKS:],
    }


def _running(past: Sequence[HistorySegment], name: str) -> list[list[float | None]]:
    """Return when a job's running instances changed, and to which number; None where it was not, or nobody looked."""
    found: list[list[float | None]] = []
    end = 0.0

    def add(at: float, running: float | None) -> None:
        if not found or found[-1][1] != running:
            found.append([at, running])

    for one in past:
        if found and one.start > end:
            add(end, None)
        job = one.point.jobs.get(name)
        if found or job:
            add(one.start, job.running if job else None)
        end = one.end
    if found and found[-1][1] is not None:
        found.append([end, found[-1][1]])
    return found


def _thinned(points: list[Any]) -> list[Any]:
    """Return at most MOST_POINTS of them, every n-th, with the last one."""
    every = -(-len(points) // MOST_POINTS)
    return points[::-every][::-1] if points else []


_FAILURES = ("lost", "failed", "gone")


def _marks(events: Mapping[str, Iterable[Event]], names: Collection[str], since: float) -> Iterable[dict[str, Any]]:
    for job, happened in events.items():
        if job not in names:
            continue
        size = 0
        for event in _without_echoes(happened):
            kind, text = "", ""
            if event.kind in ("forming", "active") and event.members:
                before, size = size, len(event.members)
                if event.kind == "forming" and before and before != size:
                    kind, text = "resize", f"{before} → {counted(size, 'instance')}: {event.reason}"
            elif event.kind == "saved":
                kind, text = "checkpoint", f"step {event.step}"
            elif event.kind in _FAILURES:
                kind, text = "failure", f"instance {event.instance}: {event.reason or event.kind}"
            elif event.kind == "ended":
                kind, text = "ended", event.outcome
            if kind and event.at >= since:
                yield {"at": event.at, "job": job, "kind": kind, "text": text}


def _without_echoes(happened: Iterable[Event]) -> Iterable[Event]:
    """Yield the events without the loss of an instance whose worker has failed: that is one failure."""
    failed = set[int | None]()
    for event in happened:
        if event.kind == "lost" and event.instance in failed:
            failed.discard(event.instance)
            continue
        if event.kind == "failed":
            failed.add(event.instance)
        yield event


def _sizes(cluster: Mapping[str, object]) -> str:
    """Return what training may use in a window, in words; empty for all."""
    return ", ".join(
        f"{size} of everything else" if name == "*" else f"{name} {size}" for name, size in cluster.items()
    )
