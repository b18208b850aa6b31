"""What pods of a namespace get to reach Redis with, where a controller serves many namespaces."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from edl_runtime.errors import EdlError, isolated
from edl_runtime.log import get_logger
from edl_runtime.store.users import NamespaceUser, set_user

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.backends.interface import JobStatus

EVERY_S = 10.0
"""How often users are set again: a Redis that was restarted, or a replica that leads now, may know none."""

log = get_logger(__name__)


class Jobs(Protocol):
    """The part of a backend that says which jobs there are."""

    async def list(self) -> list[JobStatus]: ...


class RedisAccess:
    """The Redis user of one namespace. `redis_url`: as pods reach Redis, with whatever login."""

    def __init__(self, client: Redis, user: NamespaceUser, redis_url: str, jobs: Jobs) -> None:
        self._client = client
        self._user = user
        self._redis_url = redis_url
        self._jobs = jobs

    async def grant(self) -> str:
        """Return the URL for a job that is made now, whose login works, as those of all that have not ended do.

        Raises RegistryUnavailableError, BackendError; SpecError where Redis can't make users.
        """
        made_at = [job.created_at for job in await self._jobs.list() if not job.has_ended]
        now = time.time()
        await set_user(self._client, self._user, self._user.passwords(made_at, now))
        return self._user.url(self._redis_url, now)

    async def run(self) -> None:
        """Keep the user as it has to be until cancelled. What fails is logged and repeated."""
        while True:
            try:
                with isolated(f"the Redis user {self._user.name!r}"):
                    await self.grant()
            except EdlError as error:
                log.warning("redis_user.not_set", user=self._user.name, cause=str(error), retry_in_s=EVERY_S)
            await asyncio.sleep(EVERY_S)
