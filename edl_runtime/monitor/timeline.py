"""The past, cut into columns as wide as a terminal's letters, or as points to plot. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile

import msgspec

from edl_runtime.autoscale.history import HOLDS_S, HistoryPoint, ResourceUse


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


class Cell(msgspec.Struct, frozen=True):
    """A column of a job's row: how many instances ran in the mean, and the state that it was in for longest."""

    running: float
    state: str


class Columns(msgspec.Struct, frozen=True):
    """Columns of equal times: in each, of each job, `cells`; `use` of the resources; and the `window`.

    None, or "", stands where nobody looked, and where there was no such job or window.
    """

    cells: dict[str, list[Cell | None]]
    use: dict[str, list[ResourceUse | None]]
    windows: list[str]


def columns(past: Sequence[HistorySegment], *, since: float, until: float, count: int) -> Columns:
    """Cut the time into so many columns."""
    width = (until - since) / count
    edges = [since + number * width for number in range(count + 1)]
    parts = [_within(past, start, end) for start, end in pairwise(edges)]
    resources = dict.fromkeys(name for one in past for name in one.point.use)
    return Columns(
        cells={name: [_cell(part, name) for part in parts] for name in jobs_of(past)},
        use={name: [_use(part, name) for part in parts] for name in resources},
        windows=[_longest(part, lambda point: point.window) for part in parts],
    )


Part = list[tuple[float, HistoryPoint]]
"""The points of a column, and for how long each of them told how it was."""


def _within(past: Sequence[HistorySegment], start: float, end: float) -> Part:
    first = bisect_right(past, start, key=lambda one: one.end)
    there = takewhile(lambda one: one.start < end, past[first:])
    return [(min(one.end, end) - max(one.start, start), one.point) for one in there]


def _longest(part: Part, what: Callable[[HistoryPoint], str]) -> str:
    seconds: dict[str, float] = {}
    for length, point in part:
        seconds[what(point)] = seconds.get(what(point), 0.0) + length
    return max(seconds, key=lambda said: seconds[said], default="")


def _cell(part: Part, name: str) -> Cell | None:
    state = _longest(part, state_of(name))
    there = [(seconds, point.jobs[name]) for seconds, point in part if name in point.jobs]
    if not state:
        return None
    return Cell(_mean([(seconds, float(job.running)) for seconds, job in there]), state)


def _use(part: Part, name: str) -> ResourceUse | None:
    there = [(seconds, point.use[name]) for seconds, point in part if name in point.use]
    if not there:
        return None
    allowed = [(seconds, use.allowed) for seconds, use in there if use.allowed is not None]
    return ResourceUse(
        total=_mean([(seconds, use.total) for seconds, use in there]),
        reserved=_mean([(seconds, use.reserved) for seconds, use in there]),
        ours=_mean([(seconds, use.ours) for seconds, use in there]),
        allowed=_mean(allowed) if allowed else None,
    )


def _mean(values: Sequence[tuple[float, float]]) -> float:
    return sum(seconds * value for seconds, value in values) / sum(seconds for seconds, _ in values)
