"""What limits the training speed (teachers, source or student), and the rates of the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import fmean
from typing import Literal, NamedTuple

from edl_runtime.distill.stats import ReaderStats
from edl_runtime.meter import WINDOW_S, RateMeter

Bottleneck = Literal["", "teachers", "answers", "source", "student", "balanced", "no_answer"]
"""What limits the speed; empty while nothing is read or it is not known yet.

With `answers`, the student waits for teachers that are idle, so that more of them would not help: for instance at the
beginning of each epoch (see `epochs` of the reader), or where a single request takes long. With `no_answer`, the
student has been waiting for its teachers for so long that nothing is trained any more.
"""

NOTICEABLE_WAIT = 0.1
"""Share of its time from which a student's waits count: without them it would train a tenth faster."""
NEGLIGIBLE_WAIT = 0.02
"""Share of its time up to which a student's waits don't matter."""
CONSTANT_WAIT = 0.95
IDLE_SHARE = 0.25
"""Share of their time from which teachers count as idle."""

SETTLED_S = 2 * WINDOW_S
"""A limit has to hold for so long to count. A single stall affects the rates for one window after its end."""
UNANSWERED_S = WINDOW_S
"""How long no teacher must answer to count, after a window in which none did."""
GAP_S = 60.0
"""Keep the limit during a pause of up to this, such as a validation; after a longer one, nothing is read."""


def current_bottleneck(*, trains: bool, waiting: float, waiting_for_source: float, busy: float) -> Bottleneck:
    """Return the bottleneck, from shares of the last seconds.

    - `trains`: batches were taken.
    - `waiting`: how long the student waited for its next batch; `waiting_for_source`: the part that the source took.
    - `busy`: how long a teacher had a request.
    """
    if waiting >= NOTICEABLE_WAIT and waiting_for_source > waiting / 2:
        return "source"
    if not trains:
        return "no_answer" if waiting >= CONSTANT_WAIT else ""
    if waiting >= NOTICEABLE_WAIT:
        return "teachers" if busy > 1 - IDLE_SHARE else "answers"
    return "student" if waiting <= NEGLIGIBLE_WAIT and busy <= 1 - IDLE_SHARE else "balanced"


class BottleneckFilter:
    """Reports a bottleneck only once it has lasted, to ignore short stalls. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._limit: Bottleneck = ""
        self._seen: Bottleneck = ""
        self._since = 0.0
        self._known_at = 0.0

    def update(self, seen: Bottleneck, now: float) -> Bottleneck:
        """Return the lasting bottleneck, given that of the last seconds."""
        if seen:
            self._known_at = now
        elif self._seen != "no_answer" and now - self._known_at < GAP_S:
            seen = self._seen
        if seen != self._seen:
            self._seen, self._since = seen, now
        if now - self._since >= (UNANSWERED_S if seen == "no_answer" else SETTLED_S):
            self._limit = seen
        elif self._limit == "no_answer":  # a teacher answers again
            self._limit = ""
        return self._limit


# Rates of the last seconds


class Rates(NamedTuple):
    """Rates of the last seconds; except for `steps_per_s`, see the fields of `Progress` with these names."""

    steps_per_s: float
    samples_per_s: float
    waiting: float
    busy: float
    shares: dict[str, float]
    limit: Bottleneck


class ProgressRates:
    """Computes a job's rates about once a second."""

    def __init__(self, now: float) -> None:
        """Begin; times are seconds of one monotonic clock."""
        self._meters: dict[Hashable, RateMeter] = {}
        self._busy: deque[float] = deque(maxlen=round(WINDOW_S))
        self._filter = BottleneckFilter()
        self._looked_at = now

    def update(self, *, steps: int, samples: int, reading: ReaderStats, now: float) -> Rates:
        """Return the rates up to now. `steps` and `samples` are the job's, those of its readers among them."""
        if reading.teachers:
            self._busy.append(reading.busy / reading.teachers)
        answers = {who: self._rate(("answered", who), count, now) for who, count in reading.answered.items()}
        all_answers = sum(answers.values())
        waiting = min(1.0, self._rate("waited_s", reading.waited_s, now))
        busy = fmean(self._busy) if self._busy else 0.0
        seen = current_bottleneck(
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
            limit=self._filter.update(seen, now),
        )
        self._looked_at = now
        return rates

    def _rate(self, what: Hashable, count: float, now: float) -> float:
        meter = self._meters.setdefault(what, RateMeter(self._looked_at))
        meter.mark(count, now)
        return meter.rate(count, now)
