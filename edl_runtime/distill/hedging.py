"""When a second teacher is asked the same: once a first one takes much longer than teachers usually do.

"The tail at scale" (Dean and Barroso 2013) calls it hedging. It keeps a student going whose next batch waits for a
teacher that hangs or is slow, and a budget keeps its price small: of ten requests one is doubled at most, and beyond
that one a second, so that many teachers that hang at once don't use it up for good.
"""

from __future__ import annotations

import statistics
from collections import deque

SLOW = 3.0
"""Times the median that an answer may take before a second teacher is asked."""
LEAST_DELAY_S = 0.05
UNKNOWN_DELAY_S = 1.0
"""While too few answers came to know what is usual; a model's first runs are slow."""
LEAST_KNOWN = 8
RECENT = 64

BUDGET_A_REQUEST = 0.1
BUDGET_A_SECOND = 1.0
MOST_SAVED = 16.0
FIRST_SAVED = 4.0


class Hedging:
    """Knows how long answers take, and how many requests may be doubled. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._saved = FIRST_SAVED
        self._saved_at = now
        self._delay_s = UNKNOWN_DELAY_S
        self._stale = 0

    @property
    def delay_s(self) -> float:
        """How long a request has to be under way to count as slow."""
        if self._stale >= LEAST_KNOWN:
            self._delay_s = max(LEAST_DELAY_S, SLOW * statistics.median(self._recent))
            self._stale = 0
        return self._delay_s

    def note(self, seconds: float) -> None:
        """Learn how long an answer took; cheap enough for each."""
        self._recent.append(seconds)
        self._stale += 1
        self._saved += BUDGET_A_REQUEST

    def spend(self, now: float) -> bool:
        """Use up the right to double one request; return whether there was one."""
        self._saved = min(MOST_SAVED, self._saved + BUDGET_A_SECOND * (now - self._saved_at))
        self._saved_at = now
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
