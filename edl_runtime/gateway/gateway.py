"""The pools that a gateway follows: each from its first request until it has had none for a while."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from edl_runtime.gateway.errors import FollowedPoolsError
from edl_runtime.gateway.http import TeacherClient
from edl_runtime.gateway.pool import FollowedPool
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from redis.asyncio import Redis

POOL_LIMIT = 100
"""Each pool uses two connections to Redis."""
IDLE_S = 600.0
"""How long a pool that has teachers is followed after its last request."""

EMPTY_IDLE_S = 60.0
"""How long one that has none is: its name may be anything that callers make up, and is in Redis meanwhile."""

SWEEP_EVERY_S = 10.0


class Gateway:
    """Follows pools on demand; `run` it beside its requests.

    `wait_s`: how long a request waits while a pool has no good teacher.
    """

    def __init__(self, redis: Redis, http: TeacherClient, settings: RuntimeSettings, wait_s: float) -> None:
        self.pools: dict[str, FollowedPool] = {}
        self._redis = redis
        self._directory = Directory(redis, settings.namespace)
        self._http = http
        self._settings = settings
        self.wait_s = wait_s
        self._requests: Counter[str] = Counter()
        self._used_at: dict[str, float] = {}

    @asynccontextmanager
    async def pool(self, name: str) -> AsyncIterator[FollowedPool]:
        """Follow a pool at least during the block.

        Beyond half of `POOL_LIMIT` it needs teachers, as other names may be anything that callers make up. Raises
        FollowedPoolsError, and RegistryUnavailableError if it can't be looked up.
        """
        if name not in self.pools and 2 * len(self.pools) >= POOL_LIMIT:
            has_teachers = bool(await self._directory.members(name))
            if not has_teachers or len(self.pools) >= POOL_LIMIT:
                raise FollowedPoolsError(name, len(self.pools), has_teachers)
        followed = self.pools.get(name)
        if followed is None or followed.ended:
            followed = self.pools[name] = FollowedPool(name, self._redis, self._http, self._settings, self.wait_s)
            followed.start()
        self._requests[name] += 1
        try:
            yield followed
        finally:
            self._requests[name] -= 1
            self._used_at[name] = time.monotonic()

    async def run(self) -> None:
        """Stop following pools that have no requests, until cancelled; then stop following all."""
        try:
            while True:
                await asyncio.sleep(SWEEP_EVERY_S)
                for name in list(self.pools):
                    if self._is_idle(name):  # asked only now, as each stop takes a while
                        del self._requests[name], self._used_at[name]
                        await self.pools.pop(name).stop()
        finally:
            for followed in self.pools.values():
                await followed.stop()

    def _is_idle(self, name: str) -> bool:
        """Whether it has had no request for a while; half of the limit of pools stays free of unused names."""
        if self._requests[name]:
            return False
        idle_s = time.monotonic() - self._used_at.get(name, time.monotonic())
        if self.pools[name].queue.teachers:
            return idle_s > IDLE_S
        return idle_s > EMPTY_IDLE_S or 2 * len(self.pools) > POOL_LIMIT
