"""What wakes a group's agents: Redis tells them of each event. Who misses one acts with its next heartbeat."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from edl_runtime.log import get_logger
from edl_runtime.store import keys
from edl_runtime.store.redis_client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

WAIT_S = 1.0
"""Longest single wait."""

log = get_logger(__name__)


class GroupNews:
    """One agent's subscription to what happens in the group of `job`: an asynchronous context manager.

    It costs no command: each that all agents of a large group sent after an event would count that many times.
    """

    def __init__(self, client: Redis, namespace: str, job: str) -> None:
        self._client = client
        self._calls, self._news = keys.group_channels(namespace, job)
        self._subscription: Any = client.pubsub(ignore_subscribe_messages=True)
        self._channels: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._subscription.aclose()

    async def wait(self, *, for_all: bool, timeout_s: float = WAIT_S) -> bool:
        """Wait for an event that concerns all agents, or, unless `for_all`, for any; return whether there was one.

        Returns at once for one since the last call. Raises RegistryUnavailableError.
        """
        from redis.exceptions import NoPermissionError

        wanted = {self._calls} if for_all else {self._calls, self._news}
        until = time.monotonic() + timeout_s
        with unavailable_if_lost(self._client):
            if added := wanted - self._channels:
                await self._subscription.subscribe(*added)
            if ended := self._channels - wanted:
                await self._subscription.unsubscribe(*ended)
            self._channels = wanted
            while (left_s := until - time.monotonic()) > 0:
                try:
                    if await self._subscription.get_message(timeout=left_s):
                        return True
                except NoPermissionError as error:
                    log.warning("news.forbidden", cause=str(error), so="this agent acts up to half a second late")
        return False
