"""How requests are dispatched: when to hedge, how many rows a request has, how long to wait.

Hedging follows "The tail at scale" (Dean and Barroso 2013). Nothing here does I/O or starts threads.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from edl_runtime.distill.errors import NoTeacherError
from edl_runtime.log import get_logger

HEDGE_AFTER_MEDIANS = 3.0
"""A request is hedged after so many times the median time of an answer."""
MIN_HEDGE_DELAY_S = 0.05
FIRST_HEDGE_DELAY_S = 1.0
"""Used until `MIN_ANSWERS_KNOWN` answers came; a model's first runs are slow."""
MIN_ANSWERS_KNOWN = 8
RECENT_ANSWERS = 64

HEDGES_PER_REQUEST = 0.1
HEDGES_PER_SECOND = 1.0
MAX_SAVED_HEDGES = 16.0
FIRST_SAVED_HEDGES = 4.0


class HedgingPolicy:
    """Decides when a request is slow, and how many may be hedged. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_ANSWERS)
        self._saved = FIRST_SAVED_HEDGES
        self._saved_at = now
        self._delay_s = FIRST_HEDGE_DELAY_S
        self._stale = 0

    @property
    def delay_s(self) -> float:
        """How long a request has to take to count as slow."""
        if self._stale >= MIN_ANSWERS_KNOWN:
            self._delay_s = max(MIN_HEDGE_DELAY_S, HEDGE_AFTER_MEDIANS * statistics.median(self._recent))
            self._stale = 0
        return self._delay_s

    def note(self, seconds: float) -> None:
        """Learn how long an answer took; cheap enough for each."""
        self._recent.append(seconds)
        self._stale += 1
        self._saved += HEDGES_PER_REQUEST

    def spend(self, now: float) -> bool:
        """Take the budget for one hedge; return False if there is none."""
        self._saved = min(MAX_SAVED_HEDGES, self._saved + HEDGES_PER_SECOND * (now - self._saved_at))
        self._saved_at = now
        if self._saved < 1:
            return False
        self._saved -= 1
        return True


# Size of requests

DEFAULT_ROWS = 64
MAX_ROWS = 256
MAX_REQUEST_BYTES = 8 << 20
"""Limits of one request, unless its reader sets one (measured): a request costs a student as much time as 60 small
rows, so more rows are faster; larger requests of large rows are not, and a teacher has to wait for all of them."""

FAST_ANSWER_S = 0.004
"""Teachers that answer faster than this spend most of the time on the request, not on its rows."""
SLOW_ANSWER_S = 4 * FAST_ANSWER_S
FAST_ANSWERS_TO_GROW = 32
"""So many answers in a row have to be fast before requests grow;"""
WARIER = 16
"""and so many times as many after a larger request has failed: the model may be short of memory."""


class RequestSizing:
    """The most rows of a request to one pool, from how long its teachers take. Not safe from several threads.

    Doubles from `DEFAULT_ROWS` up to `MAX_ROWS` as long as all answers are fast, and halves with each slow one.
    """

    def __init__(self) -> None:
        self.rows = DEFAULT_ROWS
        self._fast = 0
        self._steady = FAST_ANSWERS_TO_GROW

    def note(self, seconds: float) -> None:
        """Learn how long an answer took; cheap enough for each."""
        self._fast = self._fast + 1 if seconds <= FAST_ANSWER_S else 0
        if seconds > SLOW_ANSWER_S:
            self.rows = max(DEFAULT_ROWS, self.rows // 2)
        elif self._fast == self._steady:
            self.rows = min(MAX_ROWS, 2 * self.rows)
            self._fast = 0

    def fail(self) -> None:
        """Reset the size after a larger request failed, and grow more slowly."""
        if self.rows > DEFAULT_ROWS:
            self._steady *= WARIER
        self.rows, self._fast = DEFAULT_ROWS, 0


# Timeouts

LOG_WAIT_EVERY_S = 5.0

log = get_logger(__name__)


class AnswerTimeout:
    """Measures how long teachers with requests have not answered. Times are monotonic seconds.

    - `teachers`: their name in messages.
    - `wait_limit_s`: the longest time without a connected teacher.
    - `request_limit_s`: the longest time for an answer of a connected one, if that is longer.
    - `last_error`: the last problem of a teacher.
    """

    def __init__(self, teachers: str, *, wait_limit_s: float, request_limit_s: float) -> None:
        self.last_error = ""
        self._teachers = teachers
        self._wait_limit_s = wait_limit_s
        self._connected_limit_s = max(wait_limit_s, request_limit_s)
        self._heard_at: dict[str, float] = {}
        self._fresh_at = -math.inf
        self._logged_at = -math.inf

    def restart(self, now: float) -> None:
        """Measure from now: a teacher answered, or gets a request after a time without any."""
        self._fresh_at = now

    def note_answer(self, teacher: str, now: float) -> None:
        self._heard_at[teacher] = now

    def recently_answered(self, now: float) -> list[str]:
        """Return the teachers that answered within the wait limit; those gone may still return in time."""
        return [teacher for teacher, at in self._heard_at.items() if now - at < self._wait_limit_s]

    def pause_s(self, now: float, *, waiting_since: float, connected: bool) -> float:
        """Return after how many seconds to check again, and log now and then that the script waits.

        Raises NoTeacherError if the script has waited for longer than the limit without an answer.
        """
        waited_s = now - max(self._fresh_at, waiting_since)
        limit_s = self._connected_limit_s if connected else self._wait_limit_s
        if waited_s >= limit_s:
            raise NoTeacherError(self._teachers, waited_s, self.last_error)
        silent_s = min(LOG_WAIT_EVERY_S, self._wait_limit_s / 2)
        if waited_s >= silent_s and now - self._logged_at >= LOG_WAIT_EVERY_S:
            self._logged_at = now
            log.warning(
                "teachers.awaited",
                teachers=self._teachers,
                connected=connected,
                waited_s=round(waited_s, 1),
                limit_s=limit_s,
                cause=self.last_error,
            )
        return min(limit_s - waited_s, max(silent_s - waited_s, self._logged_at + LOG_WAIT_EVERY_S - now))


class SourceWait:
    """Logs now and then that the script waits for its own source, for which there is no time limit."""

    def __init__(self) -> None:
        self._logged_at = -math.inf

    def pause_s(self, now: float, waiting_since: float) -> float:
        """Return after how many seconds to check again. Times are monotonic seconds."""
        silent_s = now - max(self._logged_at, waiting_since)
        if silent_s < LOG_WAIT_EVERY_S:
            return LOG_WAIT_EVERY_S - silent_s
        self._logged_at = now
        log.warning("source.awaited", waited_s=round(now - waiting_since, 1))
        return LOG_WAIT_EVERY_S
