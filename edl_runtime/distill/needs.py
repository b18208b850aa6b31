"""What a student reports to a pool of its teachers: how long it waits for them, and how many it keeps busy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from edl_runtime.meter import WINDOW_S, Meter
from edl_runtime.pool_reports import StudentReport

PAUSE_BATCHES = 4
"""A script that takes nothing for the time of so many batches,"""
LEAST_PAUSE_S = 2.0
"""and so long on top, pauses;"""
LONGEST_PAUSE_S = 60.0
"""until then, for a longer pause is an end."""


class PoolCounts(NamedTuple):
    """How a reader stands with one pool.

    - `connected`: the addresses of the teachers in use.
    - `in_flight`, `queued`: requests that are asked now, and that wait for a teacher.
    - `waited_s`: how long the script has waited for this pool's answers; `asked_s`: how long teachers were asked
      something, all of them together; `batches`, `samples`: what the script took. These only grow.
    """

    connected: frozenset[str]
    in_flight: int
    queued: int
    waited_s: float
    asked_s: float
    batches: int
    samples: int


class Needs:
    """Makes the reports about one pool, from what `counts` returns. `want`: the most teachers that are of use."""

    def __init__(
        self, counts: Callable[[], PoolCounts], want: int | None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._counts = counts
        self._want = want
        self._clock_s = clock_s
        self._before: PoolCounts | None = None
        self._since = 0.0
        self._active_at = 0.0
        self._pause_s = math.inf
        self._waited = self._asked = self._batches = self._samples = Meter(0.0)

    def report(self) -> StudentReport:
        """Return the rates up to now, of the teachers that are there now; to be asked about once a second."""
        counts, now = self._counts(), self._clock_s()
        before, self._before = self._before, counts
        is_active = before is None or (counts.batches, counts.waited_s) != (before.batches, before.waited_s)
        goes_on = is_active and now - self._active_at > self._pause_s
        if before is None or goes_on or counts.connected != before.connected:
            self._begin(counts, now)
        if is_active:
            self._active_at = now
        idle_s = now - self._active_at
        self._waited.mark(counts.waited_s, now)
        self._asked.mark(counts.asked_s, now)
        self._batches.mark(counts.batches, now)
        self._samples.mark(counts.samples, now)
        batches_per_s = self._batches.rate(counts.batches, now)
        if is_active and batches_per_s:
            self._pause_s = LEAST_PAUSE_S + PAUSE_BATCHES / batches_per_s
        return StudentReport(
            waiting=min(1.0, self._waited.rate(counts.waited_s, now)),
            asked=self._asked.rate(counts.asked_s, now),
            samples_per_s=self._samples.rate(counts.samples, now),
            teachers=len(counts.connected),
            want=self._want,
            in_flight=counts.in_flight,
            queued=counts.queued,
            over_s=min(WINDOW_S, now - self._since),
            pauses=self._pause_s < idle_s < LONGEST_PAUSE_S,
        )

    def _begin(self, counts: PoolCounts, now: float) -> None:
        """Look back no further than this; what was before tells nothing about now."""
        self._since = now
        self._waited = Meter(now, counts.waited_s)
        self._asked = Meter(now, counts.asked_s)
        self._batches = Meter(now, counts.batches)
        self._samples = Meter(now, counts.samples)
