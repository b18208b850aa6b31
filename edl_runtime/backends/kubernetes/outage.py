"""What is told of an API server that is away: once that it is, and once that it is back, however many wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

TOLD_AFTER_S = 1.0
"""A server that is back so soon is not worth a line."""

log = structlog.get_logger(__name__)

clock = time.monotonic


class Outage:
    """Whether the server at an address is away, for all that its requests have come to know."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._since: float | None = None
        self._waiting = 0

    @contextmanager
    def waiting(self) -> Iterator[Wait]:
        """Give what one request tells of its wait for an answer."""
        wait = Wait(self)
        try:
            yield wait
        finally:
            self._waiting -= wait.is_told

    def begins(self, since: float, cause: str) -> None:
        """Know that a request waits, since when and why."""
        self._waiting += 1
        if self._since is None:
            self._since = since
            log.warning("cluster.away", address=self._address, cause=cause)

    def is_over(self) -> None:
        """Know that a request has been answered. The server is back when no other waits any more."""
        if self._since is not None and not self._waiting:
            log.info("cluster.back", address=self._address, away_s=round(clock() - self._since, 1))
            self._since = None


class Wait:
    """A request that may have to wait for its answer."""

    def __init__(self, outage: Outage) -> None:
        self.is_told = False
        self._outage = outage
        self._began = clock()

    def lasts_s(self) -> float:
        return clock() - self._began

    def goes_on(self, cause: str) -> None:
        """Know that there is no answer yet."""
        if not self.is_told and self.lasts_s() >= TOLD_AFTER_S:
            self.is_told = True
            self._outage.begins(self._began, cause)
