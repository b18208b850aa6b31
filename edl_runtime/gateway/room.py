"""How much memory requests take together, from the first byte of their bodies to the last one of their answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

from edl_runtime.gateway.errors import NoRoomError, RequestTooLargeError

_Key = tuple[str, str]
"""Whose bytes are counted: those of a pool, of a caller, or of all."""

_ALL: _Key = ("all", "")


class Holding:
    """What one request holds of the room, in bytes: it grows as bytes come, and is given back at its end.

    - `size`: what it has taken of the room; `reserved`: the part of it that is not used yet.
    - `waiting`: its parts that wait for more.
    """

    def __init__(self, room: Room, number: int, keys: tuple[_Key, ...], wait_s: float) -> None:
        self.number = number
        self.keys = keys
        self.size = 0
        self.reserved = 0
        self.waiting: set[_Waiter] = set()
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
        """Hold what it is expected to grow by, as far as that is free; the rest is held as it comes.

        It waits for a quarter of the room at most: all that one may take is not free while others hold anything. What
        it takes beyond that leaves an eighth to others, who need little perhaps. Raises NoRoomError.
        """
        size = min(size, self._room.most - self.size)
        first = min(size, self._room.size // 4)
        await self._room.take(self, first, self._wait_s)
        self.reserved += first + self._room.take_free(self, size - first)

    def unuse(self, size: int) -> None:
        """Reserve again what it has grown by, as when a teacher has failed in the middle of its answer."""
        self.reserved += size


@dataclass(eq=False)
class _Waiter:
    """One part of a request, which waits for so many bytes more, until it has them or is refused."""

    holding: Holding
    size: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    has_them: bool = False


class Room:
    """`size` bytes of memory, of which the requests of one pool get `most_of_pool` at most.

    Those of one caller get `most_of_caller`, by default as much: less leaves something of each pool to others. `most`:
    what one request may take.
    """

    def __init__(self, size: int, most_of_pool: int, most_of_caller: int | None = None) -> None:
        self.size = size
        self._limits = {
            "all": size,
            "pool": most_of_pool,
            "caller": most_of_pool if most_of_caller is None else most_of_caller,
        }
        self.most = min(self._limits.values())
        self._used: Counter[_Key] = Counter()
        self._waiting: dict[_Waiter, None] = {}  # by arrival
        self._used_by_waiting: Counter[_Key] = Counter()
        self._numbers = count()

    @contextmanager
    def opened(self, pool: str, caller: str, wait_s: float) -> Iterator[Holding]:
        """Yield what a request of a caller to a pool holds, nothing at first."""
        keys = (_ALL, ("pool", pool), ("caller", caller))
        holding = Holding(self, next(self._numbers), keys, wait_s)
        try:
            yield holding
        finally:
            self._give_back(holding, holding.size)

    async def take(self, holding: Holding, size: int, wait_s: float) -> None:
        """See `Holding.grow`."""
        if holding.size + size > self.most:
            raise RequestTooLargeError((holding.size + size) >> 20, self.most >> 20)
        if size > self._free(holding.keys):
            await self._wait(_Waiter(holding, size), wait_s)
        else:
            self._add(holding, size)

    def take_free(self, holding: Holding, size: int) -> int:
        """Hold so many bytes more, or as many as are free; return how many. An eighth of the room stays free."""
        size = max(0, min(size, self._free(holding.keys), self._free((_ALL,)) - self.size // 8))
        self._add(holding, size)
        return size

    async def _wait(self, waiter: _Waiter, wait_s: float) -> None:
        holding = waiter.holding
        self._join(waiter)
        self._refuse_one(holding.keys, waiter.size)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await waiter.ended.wait()
        except asyncio.CancelledError:
            if waiter.has_them:  # since it was cancelled
                self._give_back(holding, waiter.size)
            raise
        finally:
            if waiter in self._waiting:
                self._leave(waiter)
        if not waiter.has_them:
            needed = (holding.size + waiter.size) >> 20
            raise NoRoomError(needed, self._free(holding.keys) >> 20, self.size >> 20)

    def _join(self, waiter: _Waiter) -> None:
        if not waiter.holding.waiting:
            _count(self._used_by_waiting, waiter.holding.keys, waiter.holding.size)
        waiter.holding.waiting.add(waiter)
        self._waiting[waiter] = None

    def _leave(self, waiter: _Waiter) -> None:
        del self._waiting[waiter]
        waiter.holding.waiting.remove(waiter)
        if not waiter.holding.waiting:
            _count(self._used_by_waiting, waiter.holding.keys, -waiter.holding.size)

    def _add(self, holding: Holding, size: int) -> None:
        holding.size += size
        _count(self._used, holding.keys, size)
        if holding.waiting:  # another part of it
            _count(self._used_by_waiting, holding.keys, size)

    def _give_back(self, holding: Holding, size: int) -> None:
        """Take bytes from a request, and give them to those that have waited the longest of whom they suffice for."""
        self._add(holding, -size)
        still: dict[tuple[_Key, ...], int] = {}
        free: dict[tuple[_Key, ...], int] = {}
        for waiter in list(self._waiting):
            keys = waiter.holding.keys
            if keys not in free:
                free[keys] = self._free(keys)
            if waiter.size > free[keys]:
                still[keys] = max(waiter.size, still.get(keys, 0))
                continue
            self._leave(waiter)
            self._add(waiter.holding, waiter.size)
            waiter.has_them = True
            waiter.ended.set()
            free.clear()
        for keys, most in still.items():
            self._refuse_one(keys, most)

    def _refuse_one(self, keys: tuple[_Key, ...], size: int) -> None:
        """Refuse the youngest of those that wait for each other: no time helps where no other holds anything."""
        for key in keys:
            if self._used[key] + size > self._limits[key[0]] and self._used[key] == self._used_by_waiting[key]:
                waiting = (one.holding for one in self._waiting if key in one.holding.keys and one.holding.size)
                for waiter in list(max(waiting, key=lambda one: one.number).waiting):
                    self._leave(waiter)
                    waiter.ended.set()

    def _free(self, keys: tuple[_Key, ...]) -> int:
        return min(self._limits[key[0]] - self._used[key] for key in keys)


def _count(counter: Counter[_Key], keys: tuple[_Key, ...], size: int) -> None:
    """Add to some keys of a counter; those at 0 are left out, as callers make up any number of them."""
    for key in keys:
        counter[key] += size
        if not counter[key]:
            del counter[key]
