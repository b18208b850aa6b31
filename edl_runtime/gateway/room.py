"""How much memory requests take together, from the first byte of their bodies to the last one of their answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

from edl_runtime.gateway.errors import NoRoomError, RequestTooLargeError


class Holding:
    """What one request holds of the room, in bytes: it grows as bytes come, and is given back at its end.

    - `size`: what it has taken of the room; `reserved`: the part of it that is not used yet.
    """

    def __init__(self, room: Room, number: int, keys: tuple[Hashable, ...], wait_s: float) -> None:
        self.number = number
        self.keys = keys
        self.size = 0
        self.reserved = 0
        self.is_refused = False
        self._room = room
        self._wait_s = wait_s

    async def grow(self, size: int) -> None:
        """Hold so many bytes more, once they are free.

        Raises RequestTooLargeError for more than one request may hold, NoRoomError when they have not been free for
        `wait_s`, or never will be, as all that is held belongs to requests that wait, of which this is the youngest.
        """
        used = min(size, self.reserved)
        self.reserved -= used  # before another part of its answer grows, while this one waits
        try:
            if size > used:
                await self._room.take(self, size - used, self._wait_s)
        except BaseException:
            self.reserved += used
            raise

    async def reserve(self, size: int) -> None:
        """Hold what it is expected to grow by, or as much as one request may. Raises NoRoomError."""
        size = min(size, self._room.most - self.size)
        await self._room.take(self, size, self._wait_s)
        self.reserved += size

    def unuse(self, size: int) -> None:
        """Reserve again what it has grown by, as when a teacher has failed in the middle of its answer."""
        self.reserved += size


class Room:
    """`size` bytes of memory, of which the requests of one pool, or of one caller, get `most` at most."""

    def __init__(self, size: int, most: int) -> None:
        self.size = size
        self.most = most
        self._used: Counter[Hashable] = Counter()
        self._waiting: list[Holding] = []
        self._changed = asyncio.Event()
        self._numbers = count()

    @contextmanager
    def opened(self, pool: str, caller: str, wait_s: float) -> Iterator[Holding]:
        """Yield what a request of a caller to a pool holds, nothing at first."""
        holding = Holding(self, next(self._numbers), (None, ("pool", pool), ("caller", caller)), wait_s)
        try:
            yield holding
        finally:
            self._give_back(holding)

    async def take(self, holding: Holding, size: int, wait_s: float) -> None:
        """See `Holding.grow`."""
        if holding.size + size > self.most:
            raise RequestTooLargeError((holding.size + size) >> 20, self.most >> 20)
        if self._full(holding, size):
            await self._wait(holding, size, wait_s)
        holding.size += size
        self._used.update(dict.fromkeys(holding.keys, size))

    def _give_back(self, holding: Holding) -> None:
        self._used.subtract(dict.fromkeys(holding.keys, holding.size))
        for key in holding.keys:  # callers make up any number of them
            if not self._used[key]:
                del self._used[key]
        self._wake()

    async def _wait(self, holding: Holding, size: int, wait_s: float) -> None:
        holding.is_refused = False
        self._waiting.append(holding)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while (full := self._full(holding, size)) and not self._is_refused(holding, full):
                        await self._changed.wait()
        finally:
            self._waiting.remove(holding)
        if self._full(holding, size):
            free = min(self._limit(key) - self._used[key] for key in holding.keys)
            raise NoRoomError((holding.size + size) >> 20, free >> 20, self.size >> 20)

    def _is_refused(self, holding: Holding, full: list[Hashable]) -> bool:
        """Whether it is the youngest of those that wait for each other: no time helps where no other holds anything."""
        for key in full:
            # several parts of one answer may wait
            waiting = {one for one in self._waiting if key in one.keys and not one.is_refused and one.size}
            if waiting and sum(one.size for one in waiting) == self._used[key]:
                max(waiting, key=lambda one: one.number).is_refused = True
                self._wake()
        return holding.is_refused

    def _full(self, holding: Holding, size: int) -> list[Hashable]:
        return [key for key in holding.keys if self._used[key] + size > self._limit(key)]

    def _limit(self, key: Hashable) -> int:
        return self.size if key is None else self.most

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
