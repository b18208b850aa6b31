"""What a student reports to a pool of its teachers: how long it waits for them, and how many it keeps busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from edl_runtime.meter import WINDOW_S, Meter
from edl_runtime.pool_reports import StudentReport


class PoolCounts(NamedTuple):
    """How a reader stands with one pool.

    - `connected`: the addresses of the teachers in use.
    - `in_flight`, `queued`: requests that are asked now, and that wait for a teacher.
    - `waited_s`: how long the script has waited for this pool's answers; `asked_s`: how long teachers were asked
      something, all of them together; `samples`: what the script took. These only grow.
    """

    connected: frozenset[str]
    in_flight: int
    queued: int
    waited_s: float
    asked_s: float
    samples: int


class Needs:
    """Makes the reports about one pool, from what `counts` returns. `want`: the most teachers that are of use."""

    def __init__(
        self, counts: Callable[[], PoolCounts], want: int | None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._counts = counts
        self._want = want
        self._clock_s = clock_s
        self._connected: frozenset[str] | None = None
        self._since = 0.0
        self._waited = self._asked = self._samples = Meter(0.0)

    def report(self) -> StudentReport:
        """Return the rates up to now, of the teachers that are there now; to be asked about once a second."""
        counts, now = self._counts(), self._clock_s()
        if counts.connected != self._connected:
            self._connected, self._since = counts.connected, now
            self._waited = Meter(now, counts.waited_s)
            self._asked = Meter(now, counts.asked_s)
            self._samples = Meter(now, counts.samples)
        self._waited.mark(counts.waited_s, now)
        self._asked.mark(counts.asked_s, now)
        self._samples.mark(counts.samples, now)
        return StudentReport(
            waiting=min(1.0, self._waited.rate(counts.waited_s, now)),
            asked=self._asked.rate(counts.asked_s, now),
            samples_per_s=self._samples.rate(counts.samples, now),
            teachers=len(counts.connected),
            want=self._want,
            in_flight=counts.in_flight,
            queued=counts.queued,
            over_s=min(WINDOW_S, now - self._since),
        )
