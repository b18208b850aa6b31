"""Whether a teacher may be asked: out of quarantine, or due for a probe."""

from __future__ import annotations

import random
import threading
import time

from edl_runtime.log import get_logger

FIRST_REST_S = 0.1
LAST_REST_S = 30.0
"""A teacher in quarantine rests, each time twice as long as the time before."""

JITTER = 1.25
"""A rest is up to so many times as long, by chance: teachers that are probed at the same time again and again would be
asked the same as the last time, each of them, and what all fail would not be found."""

PROBATION = 5
"""When it has behaved for so many times the rest that would be next, that is the first again. One that answers wrongly
now and then thus loses about a tenth of its time, and one that does so all the time most of it."""

MOST_BREAKS = 3
"""A teacher that breaks its connections so often and answers nothing in between is no better than one that lies.
More than it has connections, for all of them break when it is killed."""

log = get_logger(__name__)


class Health:
    """What is known of one teacher; safe from any thread.

    A teacher that answers wrongly, with an error or nothing at all goes into quarantine. When it has rested, one of
    its connections probes it: is it ready, and is the answer to one request right? Then it is asked as before. Whatever
    it is asked in a probe and does not answer is asked of others, so a probe loses nothing.

    - `out`: set while it is out of quarantine, and from when it is not in use any more.
    - `reason`: why it is in quarantine, in words; empty if it is not.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.reason = ""
        self.out = threading.Event()
        self.out.set()
        self._lock = threading.RLock()  # reentrant: the garbage collector may retire it from inside
        self._rest_s = FIRST_REST_S
        self._due_at = 0.0  # monotonic seconds
        self._recovered_at = 0.0  # monotonic seconds
        self._retired = False
        self._breaks = 0

    def due_in_s(self, now: float) -> float:
        """How long until the teacher may be probed; 0 when it may be asked now."""
        return max(0.0, self._due_at - now) if self.reason else 0.0

    def misbehaved(self, reason: str) -> None:
        """It answered wrongly or not at all: into quarantine, for longer than the last time."""
        with self._lock:
            now = time.monotonic()
            if self._retired or self.due_in_s(now) > 0:
                return  # nobody waits for it, or another of its connections found it out already
            if not self.reason and now - self._recovered_at >= PROBATION * self._rest_s:
                self._rest_s = FIRST_REST_S
            log.warning("teacher.quarantined", teacher=self.address, cause=reason, rest_s=self._rest_s)
            self.reason = reason
            self.out.clear()
            self._due_at = now + self._rest_s * random.uniform(1, JITTER)  # noqa: S311 - nobody is to be kept from guessing
            self._rest_s = min(2 * self._rest_s, LAST_REST_S)

    def broke(self, reason: str) -> None:
        """It closed a connection in the middle of a request: it was killed, or does so again and again."""
        with self._lock:
            self._breaks += 1
            too_often = self._breaks >= MOST_BREAKS
        if too_often:
            self.misbehaved(reason)

    def answered(self, asked_at: float) -> None:
        """It answered as it should what it was asked at that time; cheap enough for each answer."""
        if not self.reason and not self._breaks:
            return
        with self._lock:
            self._breaks = 0
            if not self.reason or asked_at < self._due_at:  # then that was no probe
                return
            log.info("teacher.recovered", teacher=self.address)
            self.reason = ""
            self._recovered_at = time.monotonic()
            self.out.set()

    def retire(self) -> None:
        """It is not in use any more: nobody waits for it to recover."""
        with self._lock:
            self._retired = True
            self.out.set()
