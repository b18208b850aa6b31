"""Errors of discovery endpoints."""

from __future__ import annotations

from dataclasses import dataclass

from edl_runtime.store.errors import RegistryError


@dataclass(eq=False, repr=False)
class DiscoveryUnavailableError(RegistryError, ConnectionError):
    """Raised when a discovery endpoint does not answer, or its registry is unavailable."""

    url: str
    cause: str

    def __str__(self) -> str:
        return (
            f"the discovery endpoint {self.url} can't be used ({self.cause}); "
            "check that `edl discovery` runs there and that EDL_DISCOVERY_URL is right"
        )


class DiscoveryNotReadyError(DiscoveryUnavailableError):
    """Raised when a discovery endpoint does not answer in time, or answers 5xx, as while its Redis is away."""


@dataclass(eq=False, repr=False)
class DiscoveryRefusedError(RegistryError):
    """Raised when a discovery endpoint refuses a request: the token is wrong, or it is no discovery endpoint."""

    url: str
    status: int
    cause: str

    def __str__(self) -> str:
        return (
            f"the discovery endpoint {self.url} answered {self.status}: {self.cause}; "
            "check EDL_DISCOVERY_URL and EDL_DISCOVERY_TOKEN"
        )


@dataclass(eq=False, repr=False)
class PoolLimitError(RegistryError):
    """Raised when a student asks for one more pool than an endpoint can serve."""

    pool: str
    limit: int

    def __str__(self) -> str:
        return (
            f"this endpoint serves students of at most {self.limit} pools, and pool {self.pool!r} would be one more; "
            "run another `edl discovery`, or stop students of other pools"
        )
