"""Errors of rescaling and of traffic sources."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from edl_runtime.errors import EdlError


@dataclass(eq=False, repr=False)
class RescalingError(EdlError):
    """Raised when a rescaling, or the one that it waits for, takes too long."""

    what: str
    limit_s: float

    def __str__(self) -> str:
        return f"{self.what} has not ended within {self.limit_s:g} s; the next one does the rest"


class SourceError(EdlError):
    """Raised when a traffic source can't say what the web needs."""


@dataclass(eq=False, repr=False)
class SourceUnavailableError(SourceError, ConnectionError):
    """Raised when a traffic source does not answer, or answers with an error that may pass."""

    source: str
    cause: str

    def __str__(self) -> str:
        return (
            f"{self.source} can't be read ({self.cause}); try again, or see that it runs and that its address is right"
        )


@dataclass(eq=False, repr=False)
class NoSamplesError(SourceError, LookupError):
    """Raised when a traffic source has no samples of the requested time. `hint`: a possible reason."""

    source: str
    since: datetime
    until: datetime
    hint: str

    def __str__(self) -> str:
        span = f"{self.since:%Y-%m-%d %H:%M} to {self.until:%Y-%m-%d %H:%M} UTC"
        return f"{self.source} has nothing from {span}; {self.hint}"
