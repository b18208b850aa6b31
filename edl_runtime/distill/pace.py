"""How fast a job is: rates over the last seconds, of counts that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import fmean
from typing import NamedTuple

from edl_runtime.distill.limit import Limit, Settling, limit_now
from edl_runtime.distill.stats import ReaderStats
from edl_runtime.meter import WINDOW_S, Meter


class Rates(NamedTuple):
    """What the last seconds were like; but for `steps_per_s`, see the fields of `Progress` with these names."""

    steps_per_s: float
    samples_per_s: float
    waiting: float
    busy: float
    shares: dict[str, float]
    limit: Limit


class Pace:
    """Looks at a job about once a second."""

    def __init__(self, now: float) -> None:
        """Begin; times are seconds of one monotonic clock."""
        self._meters: dict[Hashable, Meter] = {}
        self._busy: deque[float] = deque(maxlen=round(WINDOW_S))
        self._settling = Settling()
        self._looked_at = now

    def look(self, *, steps: int, samples: int, reading: ReaderStats, now: float) -> Rates:
        """Return the rates up to now. `steps` and `samples` are the job's, those of its readers among them."""
        if reading.teachers:
            self._busy.append(reading.busy / reading.teachers)
        answers = {who: self._rate(("answered", who), count, now) for who, count in reading.answered.items()}
        all_answers = sum(answers.values())
        waiting = min(1.0, self._rate("waited_s", reading.waited_s, now))
        busy = fmean(self._busy) if self._busy else 0.0
        seen = limit_now(
            trains=self._rate("batches", reading.batches, now) > 0,
            waiting=waiting,
            waiting_for_source=self._rate("waited_for_source_s", reading.waited_for_source_s, now),
            busy=busy,
        )
        rates = Rates(
            steps_per_s=self._rate("steps", steps, now),
            samples_per_s=self._rate("samples", samples, now),
            waiting=waiting,
            busy=busy,
            shares={who: rate / all_answers for who, rate in answers.items() if rate > 0},
            limit=self._settling.look(seen, now),
        )
        self._looked_at = now
        return rates

    def _rate(self, what: Hashable, count: float, now: float) -> float:
        meter = self._meters.setdefault(what, Meter(self._looked_at))
        meter.mark(count, now)
        return meter.rate(count, now)
