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
    """Gives each request a slot of `arena`; those beyond them wait in the order in which they came."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free = list(range(arena.slots))
        self._expected: set[Asker] = set()
        self._waiting: dict[Asker, None] = {}  # in the order in which they came
        self._giving = False
        self._all_answered = asyncio.Event()

    @property
    def contested(self) -> bool:
        """Whether anybody waits for a slot."""
        return bool(self._waiting)

    @property
    def in_flight(self) -> int:
        """How many requests have a slot, wait for one or are expected."""
        return len(self._expected) + len(self._waiting) + self._arena.slots - len(self._free)

    def expect(self, asker: Asker) -> None:
        """Count one who will `take` a slot, or `leave` before; and who may wait for one up to now."""
        self._waiting.pop(asker, None)
        self._expected.add(asker)

    def take(self, asker: Asker) -> None:
        """Give `asker` a slot, now or as soon as one is free."""
        self._expected.discard(asker)
        self._waiting[asker] = None
        self._give()

    def leave(self, asker: Asker) -> None:
        """Forget one who is expected, or waits for a slot, and does not want it any more."""
        self._expected.discard(asker)
        self._waiting.pop(asker, None)
        self._tell_if_all_answered()

    def give_back(self, slot: int, request_size: int, answer_size: int) -> None:
        """Take back the slot of a request that has been answered, or whose client is gone."""
        self._arena.give_back(slot, request_size, answer_size)
        self._free.append(slot)
        self._give()
        self._tell_if_all_answered()

    def _tell_if_all_answered(self) -> None:
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
