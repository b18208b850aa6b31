"""Rates over the last seconds of counts that grow, and how long things were busy. Times are of one monotonic clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from itertools import pairwise

WINDOW_S = 10.0
"""Rates look back this far."""

_MARK_EVERY_S = 0.5


class RateMeter:
    """The rate of a count that grows, over the last `WINDOW_S`."""

    def __init__(self, now: float, count: float = 0) -> None:
        """Begin, with the count at `count`."""
        self._marks: deque[tuple[float, float]] = deque([(now, count)])

    def mark(self, count: float, now: float) -> None:
        """Note that the count stood at `count`; cheap enough for every batch."""
        marks = self._marks
        if now - marks[-1][0] >= _MARK_EVERY_S:
            marks.append((now, count))
            while len(marks) > 2 and now - marks[1][0] >= WINDOW_S:
                marks.popleft()

    def rate(self, count: float, now: float) -> float:
        """Return the growth a second up to `count` now; between two marks it counts as even."""
        marks = [*self._marks.copy(), (now, count)]
        since = max(marks[0][0], now - WINDOW_S)
        if now <= since:
            return 0.0
        (at, before), (until, after) = next(pair for pair in pairwise(marks) if pair[1][0] > since)
        return (count - before - (after - before) * (since - at) / (until - at)) / (now - since)


class BusyMeter:
    """How long things had at least one thing to do, all of them together; cheap enough for every request."""

    def __init__(self, now: float) -> None:
        """Begin, with all of them idle."""
        self._tasks: dict[Hashable, int] = {}
        self._busy = 0
        self._total_s = 0.0
        self._at = now

    def begin(self, who: Hashable, now: float) -> None:
        """One of them has one thing more to do."""
        count = self._tasks.get(who, 0)
        self._tasks[who] = count + 1
        if not count:
            self._count(now, 1)

    def end(self, who: Hashable, now: float) -> None:
        """One of them has done one of its things."""
        count = self._tasks[who] - 1
        self._tasks[who] = count
        if not count:
            del self._tasks[who]
            self._count(now, -1)

    def total_s(self, now: float) -> float:
        """Return the seconds of all of them up to now: two that were busy at the same time count twice."""
        return self._total_s + self._busy * (now - self._at)

    def _count(self, now: float, change: int) -> None:
        self._total_s = self.total_s(now)
        self._at = now
        self._busy += change
