"""What is told of an API server that is away: once that it is, and once that it is back, however many wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from edl_runtime.log import get_logger

TOLD_AFTER_S = 1.0
"""A server that is back so soon is not worth a line."""

log = get_logger(__name__)

clock = time.monotonic


class Outage:
    """Whether a server is away, for all that its requests have come to know."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._waiting = 0

    @contextmanager
    def waiting(self, address: str) -> Iterator[Wait]:
        """Give what one request to the server at that address tells of its wait for an answer."""
        wait = Wait(self, address)
        try:
            yield wait
        finally:
            self._waiting -= wait.is_told
            if wait.is_over:
                self._is_over(address)

    def begins(self, since: float, address: str, cause: str) -> None:
        """Know that a request waits, since when and why."""
        self._waiting += 1
        if self._since is None:
            self._since = since
            log.warning("cluster.away", address=address, cause=cause)

    def _is_over(self, address: str) -> None:
        """Know that a request has been answered. The server is back when no other waits any more."""
        if self._since is not None and not self._waiting:
            log.info("cluster.back", address=address, away_s=round(clock() - self._since, 1))
            self._since = None


class Wait:
    """A request that may have to wait for its answer. `is_over`: it has one."""

    def __init__(self, outage: Outage, address: str) -> None:
        self.is_told = False
        self.is_over = False
        self._outage = outage
        self._address = address
        self._began = clock()

    def lasts_s(self) -> float:
        return clock() - self._began

    def goes_on(self, cause: str) -> None:
        """Know that there is no answer yet."""
        if not self.is_told and self.lasts_s() >= TOLD_AFTER_S:
            self.is_told = True
            self._outage.begins(self._began, self._address, cause)

    def ends(self) -> None:
        """Know that there is an answer, also one that refuses."""
        self.is_over = True
