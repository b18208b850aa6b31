"""How a reader fares: counts, and rates over the last seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from edl_runtime.meter import WINDOW_S, RateMeter

MIN_STARTS = 2
MIN_STARTS_S = WINDOW_S
"""Epochs that began, and seconds since the first batch, before what these starts cost is known well enough."""


class ReaderStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader has delivered so far.

    - `batches`, `samples`: delivered over all epochs; in format "sample", what fills a request counts as a batch.
    - `samples_per_s`: over the last ten seconds, the student's own steps included.
    - `teachers`: teachers in use now, without those in quarantine.
    - `answered`: requests answered by each teacher, address → count. Only answers in delivered batches count; those
      that were fetched ahead in an epoch that was left early do not.
    - `cached`: samples that were delivered and no teacher was asked about, for the cache had all answers.
    - `epoch`: the number of the current or last one, from 0.
    - `waiting`: share of the last ten seconds that the script waited for its next batch, 0 to 1.
    - `waited_s`: how long it waited in all, the wait that goes on included.
    - `waited_for_source_s`: the part in which the source had not yielded the batch yet; the rest was for teachers.
    - `queued`: requests that wait for a teacher now.
    - `in_flight`: requests that teachers are asked now; `busy`: teachers in use that are asked something.
    - `retries`: requests that were asked again because a teacher failed or left.
    - `hedges`: requests that a second teacher was asked because the first took long.
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


def final_stats(stats: ReaderStats) -> ReaderStats:
    """Return what stays of a reader that is no more: its counts, and nothing that is now."""
    return msgspec.structs.replace(
        stats, samples_per_s=0.0, waiting=0.0, teachers=0, queued=0, in_flight=0, busy=0, quarantined={}
    )


def combined_stats(readers: Sequence[ReaderStats]) -> ReaderStats:
    """Return what these readers of one script have done in all; the epoch is the last one's."""
    answered: Counter[str] = Counter()
    quarantined: dict[str, str] = {}
    for reader in readers:
        answered.update(reader.answered)
        quarantined |= reader.quarantined
    return ReaderStats(
        batches=sum(reader.batches for reader in readers),
        samples=sum(reader.samples for reader in readers),
        samples_per_s=sum(reader.samples_per_s for reader in readers),
        teachers=sum(reader.teachers for reader in readers),
        answered=dict(answered),
        cached=sum(reader.cached for reader in readers),
        epoch=readers[-1].epoch if readers else 0,
        waiting=min(1.0, sum(reader.waiting for reader in readers)),
        waited_s=sum(reader.waited_s for reader in readers),
        waited_for_source_s=sum(reader.waited_for_source_s for reader in readers),
        queued=sum(reader.queued for reader in readers),
        in_flight=sum(reader.in_flight for reader in readers),
        busy=sum(reader.busy for reader in readers),
        retries=sum(reader.retries for reader in readers),
        hedges=sum(reader.hedges for reader in readers),
        quarantined=quarantined,
    )


class DispatcherCounts(Protocol):
    """What the tally reads of a dispatcher."""

    retries: int
    hedges: int

    @property
    def connected(self) -> Collection[str]: ...
    @property
    def queued(self) -> int: ...
    @property
    def in_flight(self) -> Sequence[str]: ...


class EpochStartWaits:
    """Measures how long a script waits for the first batch of each epoch, but for the first. Times are seconds.

    `waited_s` is always how long it has waited so far, for any batch.
    """

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._before_s = 0.0  # waited before this epoch
        self._starting = False
        self._starts = 0
        self._starts_s = 0.0
        self._others = 0
        self._others_s = 0.0

    def begin(self, waited_s: float) -> None:
        """An epoch begins."""
        self._before_s = waited_s
        self._starting = True

    def deliver(self, waited_s: float, now: float) -> None:
        """A batch is delivered."""
        took_s, self._before_s = waited_s - self._before_s, waited_s
        starting, self._starting = self._starting, False
        if self._began_at is None:
            self._began_at = now
        elif starting:
            self._starts += 1
            self._starts_s += took_s
        else:
            self._others += 1
            self._others_s += took_s

    def waiting(self, now: float) -> float:
        """Return the share of the time since the first batch that the first ones took longer than others do, 0 to 1.

        0 until that is known well enough: for `MIN_STARTS` epochs and `MIN_STARTS_S` seconds.
        """
        if self._began_at is None or self._starts < MIN_STARTS or now - self._began_at < MIN_STARTS_S:
            return 0.0
        usual_s = self._others_s / self._others if self._others else 0.0
        return max(0.0, self._starts_s - self._starts * usual_s) / (now - self._began_at)


class DeliveryCounter:
    """Counts what is delivered. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._epochs = 0
        self._batches = 0
        self._samples = 0
        self._cached = 0
        self._waited_s = {"source": 0.0, "teachers": 0.0}
        self._waits_for: Literal["source", "teachers"] | None = None
        self._waits_since = 0.0
        self._answered: Counter[str] = Counter()
        self._meter = RateMeter(now)
        self._wait_meter = RateMeter(now)
        self._starts = EpochStartWaits()

    @property
    def batches(self) -> int:
        """How many were delivered."""
        return self._batches

    @property
    def samples(self) -> int:
        """How many were delivered, in batches."""
        return self._samples

    @property
    def teachers_awaited_since(self) -> float | None:
        """Since when the script has waited for teachers; None while it does not."""
        return self._waits_since if self._waits_for == "teachers" else None

    def begin_epoch(self, now: float) -> None:
        """The script begins to read an epoch; rates leave out what was before the first."""
        if not self._epochs:
            self._meter = RateMeter(now)
            self._wait_meter = RateMeter(now)
        self._epochs += 1
        self._starts.begin(self._waited_in_all_s)

    def begin_wait(self, awaited: Literal["source", "teachers"], now: float) -> None:
        """The script begins to wait for its next batch: for the source to yield it, or for teachers."""
        self._waits_for, self._waits_since = awaited, now

    def await_teachers(self, now: float) -> None:
        """The source has yielded; if the script waits, then for teachers from here on."""
        if self._waits_for == "source":
            self.end_wait(now)
            self.begin_wait("teachers", now)

    def end_wait(self, now: float) -> None:
        """The wait is over."""
        if self._waits_for is not None:
            self._waited_s[self._waits_for] += now - self._waits_since
            self._waits_for = None

    def deliver(
        self, samples: int, answered_by: Iterable[str], now: float, *, batches: int = 1, cached: int = 0
    ) -> None:
        """Count batches whose requests these addresses answered; so many of their samples were `cached`."""
        self._batches += batches
        self._samples += samples
        self._cached += cached
        for address in answered_by:
            self._answered[address] += 1
        self._meter.mark(self._samples, now)
        self._wait_meter.mark(self._waited_in_all_s, now)
        self._starts.deliver(self._waited_in_all_s, now)

    def waiting_for_epochs(self, now: float) -> float:
        """Return the share of its time that the script waits for epochs to begin; see `EpochStartWaits`."""
        return self._starts.waiting(now)

    @property
    def _waited_in_all_s(self) -> float:
        return sum(self._waited_s.values())

    def stats(self, dispatchers: Sequence[DispatcherCounts], quarantined: Mapping[str, str], now: float) -> ReaderStats:
        """Return the counts, those of the dispatchers among them."""
        in_use = {address for pool in dispatchers for address in pool.connected} - quarantined.keys()
        asked = [address for pool in dispatchers for address in pool.in_flight]
        waited_s = dict(self._waited_s)
        if self._waits_for is not None:
            waited_s[self._waits_for] += now - self._waits_since
        waited_in_all_s = sum(waited_s.values())
        return ReaderStats(
            batches=self._batches,
            samples=self._samples,
            samples_per_s=self._meter.rate(self._samples, now),
            teachers=len(in_use),
            answered=dict(self._answered),
            cached=self._cached,
            epoch=max(0, self._epochs - 1),
            waiting=min(1.0, self._wait_meter.rate(waited_in_all_s, now)),
            waited_s=waited_in_all_s,
            waited_for_source_s=waited_s["source"],
            queued=sum(pool.queued for pool in dispatchers),
            in_flight=len(asked),
            busy=len(in_use.intersection(asked)),
            retries=sum(pool.retries for pool in dispatchers),
            hedges=sum(pool.hedges for pool in dispatchers),
            quarantined=dict(quarantined),
        )
