"""Errors of Redis."""

from __future__ import annotations

from dataclasses import dataclass

from edl_runtime.errors import EdlError


class RegistryError(EdlError):
    """Raised when the registry refuses a request or can't be used."""


@dataclass(eq=False, repr=False)
class RegistryUnavailableError(RegistryError, ConnectionError):
    """Raised when Redis does not answer, refuses access, or holds what can't be read: who runs for long tries again."""

    address: str
    cause: str

    def __str__(self) -> str:
        return (
            f"Redis at {self.address} can't be used ({self.cause}); "
            "check that it runs and that host, port, user and password are right"
        )


@dataclass(eq=False, repr=False)
class RegistryAccessError(RegistryUnavailableError):
    """Raised when Redis wants a password, or another one. Trying again does not help.

    `password_given`: whether it was given one.
    """

    password_given: bool

    def __str__(self) -> str:
        problem = "refuses this user and password" if self.password_given else "needs a password"
        advice = "the connection's `Redis password`, or into EDL_REDIS_URL as redis://USER:PASSWORD@HOST:PORT/0"
        return f"Redis at {self.address} {problem} ({self.cause}); put it into {advice}"


class RegistryTimeoutError(RegistryUnavailableError):
    """Raised when Redis does not answer in time."""


@dataclass(eq=False, repr=False)
class MalformedRecordError(RegistryUnavailableError):
    """Raised when Redis holds a record that this version can't read but needs; `address` is its key.

    Not a ValueError, because a retry may help: the record may have been repaired, or have expired.
    """

    @property
    def key(self) -> str:
        """The key, or what several that one script reads begin with."""
        return self.address

    def __str__(self) -> str:
        return (
            f"the record in Redis at {self.key!r} can't be read ({self.cause}): another version of edl-airflow wrote "
            "it, or it is damaged; stop the job or pool that it belongs to, or delete the key if none runs"
        )
