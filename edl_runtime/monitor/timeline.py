"""History points as segments of time, and as rows of a table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec

from edl_runtime.autoscale.history import HOLDS_S, HistoryPoint
from edl_runtime.monitor.snapshot import NOTHING, utilisation

HISTORY_HEADINGS = ("TIME", "WINDOW", "CPU-UTILS", "GPU-UTILS", "JOBS")


class HistorySegment(msgspec.Struct, frozen=True):
    """From `start` to before `end`, in Unix seconds, it was as `point` says."""

    start: float
    end: float
    point: HistoryPoint


class StateSpan(msgspec.Struct, frozen=True):
    """From `start` to before `end` it was `what`."""

    start: float
    end: float
    what: str


def segments_of(points: Sequence[HistoryPoint], *, since: float, until: float) -> list[HistorySegment]:
    """Return what each point tells about: the time until the next one, where that is not long after."""
    ends = (*(point.at for point in points[1:]), until)
    found = (
        HistorySegment(max(point.at, since), min(end, point.at + HOLDS_S, until), point)
        for point, end in zip(points, ends, strict=False)
    )
    return [one for one in found if one.start < one.end]


def jobs_of(past: Sequence[HistorySegment]) -> list[str]:
    """Return all jobs and pools, those that were there first before others, and of these by name."""
    return list(dict.fromkeys(name for one in past for name in sorted(one.point.jobs)))


def spans(past: Sequence[HistorySegment], what: Callable[[HistoryPoint], str]) -> list[StateSpan]:
    """Return for how long it was the same, leaving out where it was nothing and where nobody looked."""
    found: list[StateSpan] = []
    for one in past:
        said = what(one.point)
        if found and found[-1].what == said and found[-1].end == one.start:
            found[-1] = StateSpan(found[-1].start, one.end, said)
        else:
            found.append(StateSpan(one.start, one.end, said))
    return [span for span in found if span.what]


def state_of(name: str) -> Callable[[HistoryPoint], str]:
    """Return what tells a job's state at a point, "" where it was not there; see `spans`."""

    def state(point: HistoryPoint) -> str:
        there = point.jobs.get(name)
        return there.state if there else ""

    return state


def history_rows(points: Sequence[HistoryPoint], *, since: float, until: float) -> list[tuple[str, ...]]:
    """Return a row for each change between `since` and `until` (Unix seconds), in this machine's time zone.

    A row holds until the next one. "(not observed)" stands where nothing was recorded.
    """
    rows: list[tuple[str, ...]] = []
    observed_until = since
    for segment in segments_of(points, since=since, until=until):
        if segment.start > observed_until:
            rows.append((_local_time(observed_until), NOTHING, NOTHING, NOTHING, "(not observed)"))
        observed_until = segment.end
        point = segment.point
        jobs = (f"{name}:{job.running if job.state == 'running' else job.state}" for name, job in point.jobs.items())
        use = (utilisation(point.use.get(resource)) for resource in ("cpu", "gpu"))
        row = (_local_time(segment.start), point.window or NOTHING, *use, "|".join(jobs) or NOTHING)
        if not rows or row[1:] != rows[-1][1:]:
            rows.append(row)
    return rows


def _local_time(at: float) -> str:
    return f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M:%S}"
