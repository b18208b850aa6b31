"""Being registered: a lease that is renewed until one leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from edl_runtime.errors import RegistryError
from edl_runtime.registry.members import Member
from edl_runtime.store import keys

if TYPE_CHECKING:
    from redis.asyncio import Redis


class Lease:
    """A registration that is being kept up."""

    fence: int

    async def refused(self) -> RegistryError:
        """Wait until this registration can never come back and return why. For ever, if all goes well."""
        raise NotImplementedError


@asynccontextmanager
async def hold_lease(
    client: Redis, service: keys.Service, member: Member, *, ttl_s: float = 3.0
) -> AsyncIterator[Lease]:
    """Be registered as `member` of `service` from the first line of the block to its end."""
    raise NotImplementedError
    yield Lease()
