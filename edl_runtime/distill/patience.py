"""How long a training script waits for teachers."""

from __future__ import annotations

import math

from edl_runtime.errors import NoTeacherError
from edl_runtime.log import get_logger

TELL_EVERY_S = 5.0

log = get_logger(__name__)


class Patience:
    """Measures how long teachers that are asked something have answered nothing. Times are monotonic seconds.

    - `whom`: the teachers, in words, for messages.
    - `wait_limit_s`: how long without a connected teacher is too long.
    - `request_limit_s`: how long a connected one may take for an answer, if that is longer.
    - `trouble`: what was last wrong with a teacher, in words.
    """

    def __init__(self, whom: str, *, wait_limit_s: float, request_limit_s: float) -> None:
        self.trouble = ""
        self._whom = whom
        self._wait_limit_s = wait_limit_s
        self._connected_limit_s = max(wait_limit_s, request_limit_s)
        self._heard_at: dict[str, float] = {}
        self._fresh_at = -math.inf
        self._told_at = -math.inf

    def restart(self, now: float) -> None:
        """A teacher answered, or is asked something after a time of being asked nothing."""
        self._fresh_at = now

    def hear_of(self, teacher: str, now: float) -> None:
        """The teacher answered."""
        self._heard_at[teacher] = now

    def heard_of(self, now: float) -> list[str]:
        """Return the teachers that answered so lately that, if they are gone, they may be back in time."""
        return [teacher for teacher, at in self._heard_at.items() if now - at < self._wait_limit_s]

    def pause_s(self, now: float, *, waiting_since: float, connected: bool) -> float:
        """Return after how many seconds to look again, and log now and then that there is a wait.

        Raises NoTeacherError when it is over: there was no answer for too long, and the script waited all the time.
        """
        waited_s = now - max(self._fresh_at, waiting_since)
        limit_s = self._connected_limit_s if connected else self._wait_limit_s
        if waited_s >= limit_s:
            raise NoTeacherError(self._whom, waited_s, self.trouble)
        silent_s = min(TELL_EVERY_S, self._wait_limit_s / 2)
        if waited_s >= silent_s and now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            log.warning(
                "teachers.awaited",
                teachers=self._whom,
                connected=connected,
                waited_s=round(waited_s, 1),
                limit_s=limit_s,
                cause=self.trouble,
            )
        return min(limit_s - waited_s, max(silent_s - waited_s, self._told_at + TELL_EVERY_S - now))


class SourceWait:
    """Logs now and then that the script waits for its own source, which takes as long as it takes."""

    def __init__(self) -> None:
        self._told_at = -math.inf

    def pause_s(self, now: float, waiting_since: float) -> float:
        """Return after how many seconds to look again. Times are monotonic seconds."""
        silent_s = now - max(self._told_at, waiting_since)
        if silent_s < TELL_EVERY_S:
            return TELL_EVERY_S - silent_s
        self._told_at = now
        log.warning("source.awaited", waited_s=round(now - waiting_since, 1))
        return TELL_EVERY_S
