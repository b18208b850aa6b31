"""Who is registered: list and watch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.registry.members import Member
from edl_runtime.store.keys import Role

if TYPE_CHECKING:
    from redis.asyncio import Redis


class Directory:
    """The members of all pools of one namespace."""

    def __init__(self, client: Redis, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    async def members(self, pool: str, role: Role = "teachers") -> list[Member]:
        """Return the members whose lease has not run out, by id. Raises RegistryUnavailableError."""
        raise NotImplementedError

    async def watch(self, pool: str, role: Role = "teachers") -> AsyncIterator[list[Member]]:
        """Yield the members at once and again after each change."""
        raise NotImplementedError
        yield []

    async def contract(self, pool: str) -> ModelSignature | None:
        """Return what the pool's model takes and answers, None without teachers. Raises RegistryUnavailableError."""
        raise NotImplementedError

    async def pools(self) -> list[str]:
        """Return the names of the pools that have members, sorted. Raises RegistryUnavailableError."""
        raise NotImplementedError
