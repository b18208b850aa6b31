"""How a reader fares: counts, and rates over the last seconds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

WINDOW_S = 10.0
"""Rates look back this far."""

_MARK_EVERY_S = 0.5


class ReaderStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader has delivered so far.

    - `batches`, `samples`: delivered over all epochs; in format "sample", what fills a request counts as a batch.
    - `samples_per_s`: over the last ten seconds, the student's own steps included.
    - `teachers`: teachers in use now, without those in quarantine.
    - `answered`: requests answered by each teacher, address → count. Only answers in delivered batches count; those
      that were fetched ahead in an epoch that was left early do not.
    - `epoch`: the number of the current or last one, from 0.
    - `waiting`: share of the last ten seconds that the script waited for its next batch, 0 to 1.
    - `queued`: requests that wait for a teacher now.
    - `retries`: requests that were asked again because a teacher failed or left.
    - `hedges`: requests that a second teacher was asked because the first took long.
    - `quarantined`: teachers that are in quarantine now, address → why.
    """

    batches: int = 0
    samples: int = 0
    samples_per_s: float = 0.0
    teachers: int = 0
    answered: dict[str, int] = {}
    epoch: int = 0
    waiting: float = 0.0
    queued: int = 0
    retries: int = 0
    hedges: int = 0
    quarantined: dict[str, str] = {}


class Counts(Protocol):
    """What the tally reads of a dispatcher."""

    retries: int
    hedges: int

    @property
    def connected(self) -> Collection[str]: ...
    @property
    def queued(self) -> int: ...


class Meter:
    """The rate of a count that grows, over the last `WINDOW_S`. Times are seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._marks: deque[tuple[float, float]] = deque([(now, 0)])

    def mark(self, count: float, now: float) -> None:
        """Note that the count stood at `count`; cheap enough for every batch."""
        marks = self._marks
        if now - marks[-1][0] >= _MARK_EVERY_S:
            marks.append((now, count))
            while len(marks) > 2 and now - marks[1][0] >= WINDOW_S:
                marks.popleft()

    def rate(self, count: float, now: float) -> float:
        """Return the growth a second up to `count` now."""
        recent = [mark for mark in self._marks.copy() if now - mark[0] <= WINDOW_S]
        since, before = recent[0] if recent else self._marks[-1]
        return (count - before) / (now - since) if now > since else 0.0


class Tally:
    """Counts what is delivered. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.epochs = 0
        self._batches = 0
        self._samples = 0
        self._waited_s = 0.0
        self._answered: Counter[str] = Counter()
        self._meter = Meter(now)
        self._wait_meter = Meter(now)

    def wait(self, seconds: float, now: float) -> None:
        """Count a wait of the script that is over."""
        self._waited_s += seconds
        self._wait_meter.mark(self._waited_s, now)

    def deliver(self, samples: int, answered_by: Iterable[str], now: float) -> None:
        """Count one batch, whose requests these addresses answered."""
        self._batches += 1
        self._samples += samples
        for address in answered_by:
            self._answered[address] += 1
        self._meter.mark(self._samples, now)

    def stats(self, dispatchers: Sequence[Counts], quarantined: Mapping[str, str], now: float) -> ReaderStats:
        """Return the counts, those of the dispatchers among them."""
        connected = {address for pool in dispatchers for address in pool.connected}
        return ReaderStats(
            batches=self._batches,
            samples=self._samples,
            samples_per_s=self._meter.rate(self._samples, now),
            teachers=len(connected - quarantined.keys()),
            answered=dict(self._answered),
            epoch=max(0, self.epochs - 1),
            waiting=min(1.0, self._wait_meter.rate(self._waited_s, now)),
            queued=sum(pool.queued for pool in dispatchers),
            retries=sum(pool.retries for pool in dispatchers),
            hedges=sum(pool.hedges for pool in dispatchers),
            quarantined=dict(quarantined),
        )
