"""How much memory requests take together; those that find no room wait unread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edl_runtime.gateway.errors import NoRoomError


class Room:
    """`size` bytes of memory; a request `hold`s what it takes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, size: int, wait_s: float) -> AsyncIterator[None]:
        """Take so many bytes during the block, once they are free; smaller ones may overtake.

        Raises NoRoomError when they have not been for `wait_s`.
        """
        try:
            async with asyncio.timeout(wait_s):
                while self._free < size:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise NoRoomError(size >> 20, self._free >> 20, self.size >> 20) from None
        self._free -= size
        try:
            yield
        finally:
            self._free += size
            self._freed.set()
