"""How many rows a teacher is asked about at once: more than usual where asking costs more than answering."""

from __future__ import annotations

USUAL_ROWS = 64
MOST_ROWS = 256
MOST_BYTES = 8 << 20
"""What one request has at most, unless its reader says otherwise (measured): a request costs a student as much time as
60 small rows, and large ones are copied no faster in greater numbers, while a teacher starts with none of them."""

FAST_S = 0.004
"""Teachers that answer sooner than this spend most of it on the request, not on its rows."""
SLOW_S = 4 * FAST_S
STEADY = 32
"""So many answers in a row have to be fast before more is asked at once;"""
WARIER = 16
"""and so many times as many after a request of more rows has failed: the model may have no memory for them."""


class Sizing:
    """The most rows of a request to one pool, from how long its teachers take. Not safe from several threads.

    Doubles from `USUAL_ROWS` up to `MOST_ROWS` as long as all answers are fast, and halves with each slow one.
    """

    def __init__(self) -> None:
        self.rows = USUAL_ROWS
        self._fast = 0
        self._steady = STEADY

    def note(self, seconds: float) -> None:
        """Learn how long an answer took; cheap enough for each."""
        self._fast = self._fast + 1 if seconds <= FAST_S else 0
        if seconds > SLOW_S:
            self.rows = max(USUAL_ROWS, self.rows // 2)
        elif self._fast == self._steady:
            self.rows = min(MOST_ROWS, 2 * self.rows)
            self._fast = 0

    def fail(self) -> None:
        """Learn that a request of more than usual failed: begin anew, and be warier."""
        if self.rows > USUAL_ROWS:
            self._steady *= WARIER
        self.rows, self._fast = USUAL_ROWS, 0
