"""Errors of Redis: it is away, or holds what can't be read."""

from __future__ import annotations

from dataclasses import dataclass

from edl_runtime.errors import EdlError


class RegistryError(EdlError):
    """Raised when the registry refuses or can't be used."""


@dataclass(eq=False, repr=False)
class RegistryUnavailableError(RegistryError, ConnectionError):
    """Raised when Redis does not answer, or not to us."""

    address: str
    cause: str

    def __str__(self) -> str:
        return (
            f"Redis at {self.address} can't be used ({self.cause}); "
            "check that it runs and that host, port, user and password are right"
        )


class RegistrySilentError(RegistryUnavailableError):
    """Raised when Redis does not answer in time; it may be away, or slow for a moment."""


@dataclass(eq=False, repr=False)
class MalformedRecordError(RegistryError):
    """Raised when Redis holds something that this version can't read, and can't do without. `key`: where.

    No ValueError, for nobody has given it: by the next try it may have been mended, or have run out.
    """

    key: str
    problem: str

    def __str__(self) -> str:
        return (
            f"what Redis holds at {self.key!r} can't be read ({self.problem}): another version of edl-airflow has "
            "written it, or it is damaged; stop the job or pool that it belongs to, or delete the key if none runs"
        )
