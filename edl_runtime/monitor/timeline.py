"""History points as segments of time, and as rows of a table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec

from edl_runtime.autoscale.history import HOLDS_S, HistoryPoint
from edl_runtime.monitor.snapshot import NOTHING, utilisation

HISTORY_HEADINGS = ("TIME", "WINDOW", "CPU-UTILS", "GPU-UTILS", "JOBS")


class HistorySegment(msgspec.Struct, frozen=True):
    """`point` held from `start` to before `end`, in Unix seconds."""

    start: float
    end: float
    point: HistoryPoint


class StateSpan(msgspec.Struct, frozen=True):
    """A state or window, `what`, from `start` to before `end`."""

    start: float
    end: float
    what: str


def segments_of(points: Sequence[HistoryPoint], *, since: float, until: float) -> list[HistorySegment]:
    """Return the time that each point holds: until the next one, and for at most HOLDS_S."""
    ends = (*(point.at for point in points[1:]), until)
    found = (
        HistorySegment(max(point.at, since), min(end, point.at + HOLDS_S, until), point)
        for point, end in zip(points, ends, strict=False)
    )
    return [one for one in found if one.start < one.end]


def jobs_of(past: Sequence[HistorySegment]) -> list[str]:
    """Return the names of all jobs and pools, by first appearance, then by name."""
    return list(dict.fromkeys(name for one in past for name in sorted(one.point.jobs)))


def spans(past: Sequence[HistorySegment], what: Callable[[HistoryPoint], str]) -> list[StateSpan]:
    """Join adjacent segments of equal `what`. Leaves out an empty `what`, and times without a point."""
    found: list[StateSpan] = []
    for one in past:
        value = what(one.point)
        if found and found[-1].what == value and found[-1].end == one.start:
            found[-1] = StateSpan(found[-1].start, one.end, value)
        else:
            found.append(StateSpan(one.start, one.end, value))
    return [span for span in found if span.what]


def state_of(name: str) -> Callable[[HistoryPoint], str]:
    """Return a function of a job's state at a point, "" where it was absent; see `spans`."""

    def state(point: HistoryPoint) -> str:
        there = point.jobs.get(name)
        return there.state if there else ""

    return state


def history_rows(points: Sequence[HistoryPoint], *, since: float, until: float) -> list[tuple[str, ...]]:
    """Return a row for each change between `since` and `until` (Unix seconds), in this machine's time zone.

    A row holds until the next one. "(not observed)" is for times without a record.
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
