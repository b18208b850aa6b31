"""Errors of discovery endpoints."""

from __future__ import annotations

from dataclasses import dataclass

from edl_runtime.store.errors import RegistryError


@dataclass(eq=False, repr=False)
class DiscoveryUnavailableError(RegistryError, ConnectionError):
    """Raised when a discovery endpoint does not answer, or has no registry to ask."""

    url: str
    cause: str

    def __str__(self) -> str:
        return (
            f"the discovery endpoint {self.url} can't be used ({self.cause}); "
            "check that `edl discovery` runs there and that EDL_DISCOVERY_URL is right"
        )


class DiscoverySilentError(DiscoveryUnavailableError):
    """Raised when a discovery endpoint does not answer in time; it may be away, or slow for a moment."""


@dataclass(eq=False, repr=False)
class DiscoveryRefusedError(RegistryError):
    """Raised when a discovery endpoint refuses a request: a wrong token, or something that is no such endpoint."""

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
    """Raised when an endpoint follows as many pools as it can, and a student asks for another."""

    pool: str
    limit: int

    def __str__(self) -> str:
        return (
            f"this endpoint already has students of {self.limit} pools, the most that it follows at once, and pool "
            f"{self.pool!r} is not among them; run another `edl discovery`, or stop students of other pools"
        )
