"""Which request gets a slot of the arena, where slow bodies are kept, and which clients have stalled."""

from __future__ import annotations

import array
import asyncio
import fcntl
import mmap
import termios
from typing import NamedTuple, Protocol

from edl_runtime.teacher.shm.arena import Arena


class SlotWaiter(Protocol):
    """Who needs a slot for a request."""

    def begin_body(self, slot: int) -> None:
        """Use `slot`, and give it back."""
        ...


class SlotQueue:
    """Gives each request a slot of `arena`; those beyond them wait in the order in which they came."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free = list(range(arena.slots))
        self._expected: set[SlotWaiter] = set()
        self._waiting: dict[SlotWaiter, None] = {}  # in the order in which they came
        self._is_giving = False
        self._all_answered = asyncio.Event()

    @property
    def contested(self) -> bool:
        """Whether anybody waits for a slot."""
        return bool(self._waiting)

    @property
    def in_flight(self) -> int:
        """How many requests have a slot, wait for one or are expected."""
        return len(self._expected) + len(self._waiting) + self._arena.slots - len(self._free)

    def expect(self, waiter: SlotWaiter) -> None:
        """Count one who will `take` a slot, or `leave` before; and who may wait for one up to now."""
        self._waiting.pop(waiter, None)
        self._expected.add(waiter)

    def take(self, waiter: SlotWaiter) -> None:
        """Give `waiter` a slot, now or as soon as one is free."""
        self._expected.discard(waiter)
        self._waiting[waiter] = None
        self._give()

    def leave(self, waiter: SlotWaiter) -> None:
        """Forget one who is expected, or waits for a slot, and does not want it any more."""
        self._expected.discard(waiter)
        self._waiting.pop(waiter, None)
        self._notify_if_idle()

    def give_back(self, slot: int, request_size: int, answer_size: int) -> None:
        """Take back the slot of a request that has been answered, or whose client is gone."""
        self._arena.give_back(slot, request_size, answer_size)
        self._free.append(slot)
        self._give()
        self._notify_if_idle()

    def _notify_if_idle(self) -> None:
        if not self.in_flight:
            self._all_answered.set()

    def _give(self) -> None:
        """Give free slots to those who wait, one after the other: many may be given back as soon as they are given."""
        if self._is_giving:
            return
        self._is_giving = True
        try:
            while self._waiting and self._free:
                waiter = next(iter(self._waiting))
                del self._waiting[waiter]
                waiter.begin_body(self._free.pop())
        finally:
            self._is_giving = False

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


# Memory beside the slots, for slow bodies

MAX_SIDE_BUFFER_BYTES = 256 * 1024 * 1024
"""Bytes that the bodies in such memory may have, those included that have yet to come."""


class BodySender(Protocol):
    """Whose body is received into such memory."""

    @property
    def slow(self) -> bool:
        """Whether the last look found that the body comes too slowly."""
        ...

    @property
    def bytes_to_come(self) -> int:
        """Bytes of the body that have yet to come."""
        ...

    def refuse_body(self) -> None:
        """Answer that there is no room for the body, and forget its memory."""
        ...


class SideBuffers:
    """Gives senders memory for whole bodies, of `most` bytes in all. Only what is written takes memory of the machine.

    Where a slow sender is one too many, the slow one goes whose body has the most to come, be it one that has memory.
    One that is not slow never goes.
    """

    def __init__(self, most: int = MAX_SIDE_BUFFER_BYTES) -> None:
        self._most = most
        self._sizes: dict[BodySender, int] = {}

    @property
    def size(self) -> int:
        """Bytes of all bodies that have memory here."""
        return sum(self._sizes.values())

    def take(self, sender: BodySender, size: int) -> memoryview | None:
        """Return memory for the `size` bytes of a body, until `give_back`; None if there is no room for it."""
        if size > self._most:
            return None
        while self.size + size > self._most:
            slow = [one for one in (sender, *self._sizes) if one.slow]
            worst = max(slow, key=lambda one: one.bytes_to_come, default=sender)
            if worst is sender or not sender.slow:
                return None
            del self._sizes[worst]
            worst.refuse_body()
        self._sizes[sender] = size
        return memoryview(mmap.mmap(-1, size))

    def give_back(self, sender: BodySender) -> None:
        """Forget the body of `sender`, if it has memory here."""
        self._sizes.pop(sender, None)


# Stalled clients

STALL_CHECK_S = 1.0
"""How often a teacher looks at its clients."""

MAX_STALLED_CHECKS = 30
"""A client is disconnected when it is its turn and so many looks in a row find that it has done nothing: neither sent
more of a request nor taken more of an answer, nor yet made a request (with the token, if one is asked for)."""

MAX_STALLED_CHECKS_CONTESTED = 3
"""In place of these for one that holds a slot while others wait for one: then it has to move `MIN_BYTES_CONTESTED`.
Of a request it moves less only once: then the body is received beside the slots, and it goes if there is no room. And
after so many in which it has done nothing, it goes when a new client is one too many."""

MIN_BYTES_CONTESTED = 256 * 1024


class ClientProgress(NamedTuple):
    """How far a client is: with what, and how many bytes of that have gone from or to it. These grow."""

    turn: object
    moved: int


class StallDetector:
    """What the looks at one client tell.

    - `checks`: how many in a row have found less than they ask for, up to the last.
    - `moved`: bytes between the last two; None if the client had no part then, or another one.
    """

    def __init__(self) -> None:
        self.checks = 0
        self.moved: int | None = None
        self._seen: ClientProgress | None = None

    def check(self, progress: ClientProgress | None, least: int = 1) -> int:
        """Return how many looks in a row have found less than `least` bytes moved.

        `progress` is None while it is not the client's turn.
        """
        self.moved = self._moved_since(progress)
        self.checks = self.checks + 1 if self.moved is not None and self.moved < least else 0
        self._seen = progress
        return self.checks

    def current(self, progress: ClientProgress | None) -> int:
        """Return what the last look found, or 0 if a byte has moved since."""
        moved = self._moved_since(progress)
        return self.checks if moved is not None and moved < 1 else 0

    def _moved_since(self, progress: ClientProgress | None) -> int | None:
        if progress is None or self._seen is None or progress.turn != self._seen.turn:
            return None
        return progress.moved - self._seen.moved


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Return how many bytes the client's machine has not taken yet of what has been written.

    The system's own buffer counts, if it tells: it may be long until that takes more of what is behind it.
    """
    ours = transport.get_write_buffer_size()
    connected = transport.get_extra_info("socket")
    system = array.array("i", [0])
    try:
        fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, system)
    except OSError:
        return ours
    return ours + system[0]
