"""Whose the slots of the arena are."""

from __future__ import annotations

import asyncio
from typing import Protocol

from edl_runtime.teacher.arena import Arena


class Asker(Protocol):
    """Who needs a slot for a request."""

    def begin_body(self, slot: int) -> None:
        """Use `slot`, and give it back."""
        ...


class Slots:
    """Gives each request a slot of `arena`; those beyond them wait in the order in which they came.

    `in_flight` counts the requests that have a slot or wait for one.
    """

    def __init__(self, arena: Arena) -> None:
        self.in_flight = 0
        self._arena = arena
        self._free = list(range(arena.slots))
        self._waiting: dict[Asker, None] = {}  # in the order in which they came
        self._giving = False
        self._all_answered = asyncio.Event()

    @property
    def contested(self) -> bool:
        """Whether anybody waits for a slot."""
        return bool(self._waiting)

    def take(self, asker: Asker) -> None:
        """Give `asker` a slot, now or as soon as one is free."""
        self.in_flight += 1
        self._waiting[asker] = None
        self._give()

    def leave(self, asker: Asker) -> None:
        """Forget one who waits for a slot and does not want it any more."""
        del self._waiting[asker]
        self.in_flight -= 1

    def give_back(self, slot: int, request_size: int, answer_size: int) -> None:
        """Take back the slot of a request that has been answered, or whose client is gone."""
        self.in_flight -= 1
        self._arena.give_back(slot, request_size, answer_size)
        self._free.append(slot)
        self._give()
        if not self.in_flight:
            self._all_answered.set()

    def _give(self) -> None:
        """Give free slots to those who wait, one after the other: many may be given back as soon as they are given."""
        if self._giving:
            return
        self._giving = True
        try:
            while self._waiting and self._free:
                asker = next(iter(self._waiting))
                del self._waiting[asker]
                asker.begin_body(self._free.pop())
        finally:
            self._giving = False

    async def all_answered(self, limit_s: float) -> bool:
        """Wait until nothing is in flight; return whether that was within `limit_s`."""
        if self.in_flight:
            self._all_answered.clear()
            try:
                async with asyncio.timeout(limit_s):
                    await self._all_answered.wait()
            except TimeoutError:
                return False
        return True
