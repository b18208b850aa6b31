"""Counts of a reader, and rates over the last seconds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from edl_runtime.meter import RateMeter

if TYPE_CHECKING:
    from edl_runtime.distill.dispatcher import Dispatcher


class ReaderStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader has delivered so far.

    - `batches`, `samples`: delivered over all epochs; in format "sample", what fills a request counts as a batch.
    - `samples_per_s`: over the last ten seconds, the student's own steps included.
    - `teachers`: teachers in use now, without those in quarantine.
    - `answered`: requests answered by each teacher, address → count. Only answers in delivered batches count; those
      that were fetched ahead in an epoch that was left early do not.
    - `cached`: delivered samples that were sent to no teacher since the cache had all answers.
    - `epoch`: the number of the current or last one, from 0.
    - `waiting`: share of the last ten seconds that the script waited for its next batch, 0 to 1.
    - `waited_s`: how long it waited in all, including the current wait.
    - `waited_for_source_s`: the part in which the source had not yielded the batch yet; the rest was for teachers.
    - `queued`: requests that wait for a teacher now.
    - `in_flight`: requests at teachers now; `busy`: teachers in use that have a request.
    - `retries`: requests that were sent again because a teacher failed or left.
    - `hedges`: requests that were also sent to a second teacher because the first took long.
    - `quarantined`: teachers that are in quarantine now, address → why.
    """

    batches: int = 0
    samples: int = 0
    samples_per_s: float = 0.0
    teachers: int = 0
    answered: dict[str, int] = {}
    cached: int = 0
    epoch: int = 0
    waiting: float = 0.0
    waited_s: float = 0.0
    waited_for_source_s: float = 0.0
    queued: int = 0
    in_flight: int = 0
    busy: int = 0
    retries: int = 0
    hedges: int = 0
    quarantined: dict[str, str] = {}


_NOW = frozenset({"samples_per_s", "waiting", "teachers", "queued", "in_flight", "busy", "quarantined"})
"""The fields that describe the present. The others are counts, which stay when a reader is closed."""


def combined_stats(readers: Sequence[ReaderStats]) -> ReaderStats:
    """Return the sums of the stats of one script's readers; `epoch` is the last one's."""
    both = ReaderStats()
    for reader in readers:
        sums = {
            name: value + getattr(reader, name)
            for name, value in msgspec.structs.asdict(both).items()
            if isinstance(value, int | float)
        }
        sums |= {"epoch": reader.epoch, "waiting": min(1.0, sums["waiting"])}
        answered = dict(Counter(both.answered) + Counter(reader.answered))
        both = ReaderStats(**sums, answered=answered, quarantined=both.quarantined | reader.quarantined)
    return both


class StatsOfReaders:
    """The sum of several readers' stats. What a reader counted stays when it is removed: a counter never falls."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: the garbage collector may remove a reader from inside
        self._readers: list[Callable[[], ReaderStats]] = []
        self._finished = ReaderStats()

    def add(self, stats: Callable[[], ReaderStats]) -> None:
        with self._lock:
            self._readers.append(stats)

    def remove(self, stats: Callable[[], ReaderStats]) -> None:
        """Keep the reader's counts, without the fields that describe the present, and release it."""
        last = {name: value for name, value in msgspec.structs.asdict(stats()).items() if name not in _NOW}
        with self._lock:
            if stats in self._readers:
                self._readers.remove(stats)
                self._finished = combined_stats([self._finished, ReaderStats(**last)])

    def stats(self) -> ReaderStats:
        with self._lock:
            return combined_stats([self._finished, *(stats() for stats in self._readers)])


class DeliveryCounter:
    """Counts what is delivered. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.batches = 0
        self.samples = 0
        self._epochs = 0
        self._cached = 0
        self._waited_s = {"source": 0.0, "teachers": 0.0}
        self._waits_for: Literal["source", "teachers"] | None = None
        self._waits_since = 0.0
        self._answered: Counter[str] = Counter()
        self._meter = RateMeter(now)
        self._wait_meter = RateMeter(now)

    @property
    def teachers_awaited_since(self) -> float | None:
        """Since when the script has been waiting for teachers; None while it is not."""
        return self._waits_since if self._waits_for == "teachers" else None

    def begin_epoch(self, now: float) -> None:
        """The script begins to read an epoch; rates leave out the time before the first."""
        if not self._epochs:
            self._meter = RateMeter(now)
            self._wait_meter = RateMeter(now)
        self._epochs += 1

    def begin_wait(self, awaited: Literal["source", "teachers"], now: float) -> None:
        """The script begins to wait for its next batch: for the source to yield it, or for teachers."""
        self._waits_for, self._waits_since = awaited, now

    def await_teachers(self, now: float) -> None:
        """The source has yielded; if the script waits, then for teachers from here on."""
        if self._waits_for == "source":
            self.end_wait(now)
            self.begin_wait("teachers", now)

    def end_wait(self, now: float) -> None:
        if self._waits_for is not None:
            self._waited_s[self._waits_for] += now - self._waits_since
            self._waits_for = None

    def deliver(
        self, samples: int, answered_by: Iterable[str], now: float, *, batches: int = 1, cached: int = 0
    ) -> None:
        """Count batches whose requests these addresses answered; `cached` of their samples came from the cache."""
        self.batches += batches
        self.samples += samples
        self._cached += cached
        for address in answered_by:
            self._answered[address] += 1
        self._meter.mark(self.samples, now)
        self._wait_meter.mark(sum(self._waited_s.values()), now)

    def stats(self, dispatchers: Sequence[Dispatcher], quarantined: Mapping[str, str], now: float) -> ReaderStats:
        in_use = {address for pool in dispatchers for address in pool.connected} - quarantined.keys()
        in_flight = [address for pool in dispatchers for address in pool.in_flight]
        waited_s = dict(self._waited_s)
        if self._waits_for is not None:
            waited_s[self._waits_for] += now - self._waits_since
        waited_in_all_s = sum(waited_s.values())
        return ReaderStats(
            batches=self.batches,
            samples=self.samples,
            samples_per_s=self._meter.rate(self.samples, now),
            teachers=len(in_use),
            answered=dict(self._answered),
            cached=self._cached,
            epoch=max(0, self._epochs - 1),
            waiting=min(1.0, self._wait_meter.rate(waited_in_all_s, now)),
            waited_s=waited_in_all_s,
            waited_for_source_s=waited_s["source"],
            queued=sum(pool.queued for pool in dispatchers),
            in_flight=len(in_flight),
            busy=len(in_use.intersection(in_flight)),
            retries=sum(pool.retries for pool in dispatchers),
            hedges=sum(pool.hedges for pool in dispatchers),
            quarantined=dict(quarantined),
        )
