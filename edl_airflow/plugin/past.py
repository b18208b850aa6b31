"""The last day of a connection for the timeline: read in parts, as others add to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from edl_airflow.client import EdlClient
from edl_airflow.plugin.live import Seen
from edl_runtime.autoscale.history import HistoryPoint, read_points
from edl_runtime.autoscale.outlook import past_spans
from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.elastic.rendezvous.redis_store import Event, last_events
from edl_runtime.monitor.timeline import HistorySegment, segments_of, spans, state_of

DAY_S = 24 * 3600.0
MOST_POINTS = 500
"""Of a series."""

MOST_MARKS = 500
MOST_JOBS = 200
"""Jobs whose events are read, the last ones by name being left out."""

EVENTS_OF_JOB = 100

READ_EVERY_S = 15.0


class PastReader:
    """Reads the points of a connection's last day. Belongs to one event loop."""

    def __init__(self) -> None:
        self._points: list[HistoryPoint] = []
        self._names: set[str] = set()
        self._owners: dict[str, str | None] = {}
        self._read_at = 0.0
        self._lock = asyncio.Lock()

    async def points(self, client: EdlClient) -> Sequence[HistoryPoint]:
        """Return the points of the last day; only new ones are read from Redis. Raises RegistryUnavailableError."""
        async with self._lock:
            now = time.time()
            if now > self._read_at + READ_EVERY_S:
                last = self._points[-1].at if self._points else now - DAY_S
                new = await read_points(client.redis, client.namespace, since=last)
                kept = [point for point in self._points if point.at > now - DAY_S]
                self._points = [*kept, *(point for point in new if not self._points or point.at > last)]
                self._names = {name for point in self._points for name in point.jobs}
                self._owners = {name: owner for name, owner in self._owners.items() if name in self._names}
                self._read_at = now
            return self._points

    async def owners_of_removed(self, client: EdlClient, there: Collection[str]) -> dict[str, str]:
        """Return the owners of jobs and pools of the last day that are not `there` any more, empty for nobody's.

        Those of which no log is kept are left out, and of many, the last ones by name. Raises BackendError.
        """
        removed = sorted(self._names.difference(there))[:MOST_JOBS]
        for name in removed:
            if name not in self._owners:
                try:
                    self._owners[name] = await client.backend.owner(name)
                except UnknownJobError:
                    self._owners[name] = None
        return {name: owner for name in removed if (owner := self._owners[name]) is not None}


async def events_of(client: EdlClient, jobs: Collection[str]) -> dict[str, list[Event]]:
    """Return the last events of these jobs' trainers. Raises RegistryUnavailableError."""
    return await last_events(client.redis, client.namespace, sorted(jobs)[:MOST_JOBS], most=EVENTS_OF_JOB)


def timeline(
    points: Sequence[HistoryPoint],
    events: Mapping[str, Sequence[Event]],
    seen: Seen,
    names: Collection[str],
    now: float,
) -> dict[str, Any]:
    """Return the answer of `timeline` about jobs and pools of these names. Pure."""
    since = now - DAY_S
    past = segments_of(points, since=since, until=now)
    windows = seen.done.rules.windows if seen.done and seen.done.rules else None
    there = {name: point.kind for one in past for name, point in one.point.jobs.items() if name in names}
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
                "points": _thinned(_running(past, name)),
                "states": [
                    [span.start, span.end, span.what] for span in spans(past, state_of(name)) if span.what != "running"
                ],
                "ahead": [[one.at, one.targets[name]] for one in expected if name in one.targets],
            }
            for name, kind in sorted(there.items())
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
        for event in happened:
            kind, text = "", event.line().partition("  ")[2].strip()
            if event.kind in ("forming", "active") and event.members:
                before, size = size, len(event.members)
                if event.kind == "forming" and before and before != size:
                    kind, text = "resize", f"{before} → {size} instances: {event.reason}"
            elif event.kind == "saved":
                kind, text = "checkpoint", f"step {event.step}"
            elif event.kind in _FAILURES:
                kind, text = "failure", f"instance {event.instance}: {event.reason or event.kind}"
            elif event.kind == "ended":
                kind, text = "ended", event.outcome
            if kind and event.at >= since:
                yield {"at": event.at, "job": job, "kind": kind, "text": text}


def _sizes(cluster: Mapping[str, object]) -> str:
    """Return what training may use in a window, in words; empty for all."""
    return ", ".join(
        f"{size} of everything else" if name == "*" else f"{name} {size}" for name, size in cluster.items()
    )
