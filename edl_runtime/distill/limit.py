"""Who is the limit of a training: its teachers, its source or the student itself."""

from __future__ import annotations

from typing import Literal

from edl_runtime.meter import WINDOW_S

Limit = Literal["", "teachers", "answers", "source", "student", "balanced", "no_answer"]
"""The first that more or less of would change the speed; empty while nothing is read or it is not clear yet.

With `answers`, the student waits for its teachers although they are idle, so that more of them would not help: at the
beginning of each epoch, say, or where a single request takes long. With `no_answer`, the student has waited for its
teachers for so long that nothing is trained any more.
"""

MUCH = 0.1
"""Share of its time from which on a student's waits count: without them it would train a tenth faster."""
LITTLE = 0.02
"""Share of its time up to which a student does not notice that it waits."""
ALL = 0.95
IDLE = 0.25
"""Share of their time from which on teachers count as idle."""

SETTLED_S = 2 * WINDOW_S
"""A limit has to hold for so long to count. A single stall is in the rates for one window after its end."""
UNANSWERED_S = WINDOW_S
"""That no teacher answers has to hold for so long, after a window in which none did."""
GAP_S = 60.0
"""A long step, or a validation, is no news; longer than that, nobody reads."""


def limit_now(*, trains: bool, waiting: float, waiting_for_source: float, busy: float) -> Limit:
    """Return who is the limit, from shares of the last seconds.

    - `trains`: batches were taken.
    - `waiting`: how long the student waited for its next batch; `waiting_for_source`: the part that the source took.
    - `busy`: how long a teacher was asked something.
    """
    if waiting >= MUCH and waiting_for_source > waiting / 2:
        return "source"
    if not trains:
        return "no_answer" if waiting >= ALL else ""
    if waiting >= MUCH:
        return "teachers" if busy > 1 - IDLE else "answers"
    return "student" if waiting <= LITTLE and busy <= 1 - IDLE else "balanced"


class Settling:
    """Makes up its mind slowly, so that a moment's trouble is no news. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._limit: Limit = ""
        self._seen: Limit = ""
        self._since = 0.0
        self._known_at = 0.0

    def look(self, seen: Limit, now: float) -> Limit:
        """Return the limit that counts, given the one of the last seconds."""
        if seen:
            self._known_at = now
        elif self._seen != "no_answer" and now - self._known_at < GAP_S:
            seen = self._seen
        if seen != self._seen:
            self._seen, self._since = seen, now
        if now - self._since >= (UNANSWERED_S if seen == "no_answer" else SETTLED_S):
            self._limit = seen
        elif self._limit == "no_answer":  # one does
            self._limit = ""
        return self._limit
