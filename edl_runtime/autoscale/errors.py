"""Errors of rescaling, and of the sources that tell what the web needs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from edl_runtime.errors import EdlError


@dataclass(eq=False, repr=False)
class RescalingError(EdlError):
    """Raised when a rescaling, or the one that it waits for, does not come to its end."""

    what: str
    limit_s: float

    def __str__(self) -> str:
        return f"{self.what} has not ended within {self.limit_s:g} s; the next one does what is left to do"


class SourceError(EdlError):
    """Raised when a traffic source does not say what the web needs."""


@dataclass(eq=False, repr=False)
class SourceUnavailableError(SourceError, ConnectionError):
    """Raised when a traffic source does not answer, or is in trouble: later it may be well again."""

    source: str
    cause: str

    def __str__(self) -> str:
        return f"{self.source} can't be asked what the web needs ({self.cause})"


@dataclass(eq=False, repr=False)
class NoSamplesError(SourceError, LookupError):
    """Raised when a traffic source was asked of a time, and has nothing of it. `hint`: what may be the reason."""

    source: str
    since: datetime
    until: datetime
    hint: str

    def __str__(self) -> str:
        span = f"{self.since:%Y-%m-%d %H:%M} to {self.until:%Y-%m-%d %H:%M} UTC"
        return f"{self.source} has nothing from {span}; {self.hint}"
