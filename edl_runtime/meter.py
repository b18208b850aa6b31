"""Rates of counters over the last seconds, and busy times. All times are of one monotonic clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from itertools import pairwise

WINDOW_S = 10.0
"""The window of rates."""

_MARK_EVERY_S = 0.5


class RateMeter:
    """The rate of a counter over the last `WINDOW_S`."""

    def __init__(self, now: float, count: float = 0) -> None:
        self._marks: deque[tuple[float, float]] = deque([(now, count)])

    def mark(self, count: float, now: float) -> None:
        """Record the counter's value; cheap enough for every batch."""
        marks = self._marks
        if now - marks[-1][0] >= _MARK_EVERY_S:
            marks.append((now, count))
            while len(marks) > 2 and now - marks[1][0] >= WINDOW_S:
                marks.popleft()

    def rate(self, count: float, now: float) -> float:
        """Return the growth per second up to `count` now; interpolates linearly between marks."""
        marks = [*self._marks.copy(), (now, count)]
        since = max(marks[0][0], now - WINDOW_S)
        if now <= since:
            return 0.0
        (at, before), (until, after) = next(pair for pair in pairwise(marks) if pair[1][0] > since)
        return (count - before - (after - before) * (since - at) / (until - at)) / (now - since)


class BusyMeter:
    """The total time in which workers had at least one task; cheap enough for every request."""

    def __init__(self, now: float) -> None:
        self._tasks: dict[Hashable, int] = {}
        self._busy = 0
        self._total_s = 0.0
        self._at = now

    def begin(self, worker: Hashable, now: float) -> None:
        """A worker has one task more."""
        count = self._tasks.get(worker, 0)
        self._tasks[worker] = count + 1
        if not count:
            self._count(now, 1)

    def end(self, worker: Hashable, now: float) -> None:
        """A worker has finished a task."""
        count = self._tasks[worker] - 1
        self._tasks[worker] = count
        if not count:
            del self._tasks[worker]
            self._count(now, -1)

    def total_s(self, now: float) -> float:
        """Return the busy seconds of all workers up to now, added up."""
        return self._total_s + self._busy * (now - self._at)

    def _count(self, now: float, change: int) -> None:
        self._total_s = self.total_s(now)
        self._at = now
        self._busy += change
