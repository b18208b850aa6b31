"""Admission control: slots of the arena, memory for bodies that are not in it, and detection of stalled clients."""

from __future__ import annotations

import array
import asyncio
import fcntl
import mmap
import termios
from typing import NamedTuple, Protocol

from edl_runtime.concurrency import wait_for_event
from edl_runtime.teacher.shm.arena import Arena


class SlotWaiter(Protocol):
    """A connection that needs a slot for a request."""

    def begin_body(self, slot: int) -> None:
        """Use `slot`; pass it to `SlotQueue.give_back` afterwards."""


class SlotQueue:
    """Gives each request a slot of `arena`; when all are in use, requests wait first come, first served."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free = list(range(arena.slots))
        self._expected: set[SlotWaiter] = set()
        self._waiting: dict[SlotWaiter, None] = {}  # an ordered set
        self._is_giving = False
        self._all_answered = asyncio.Event()

    @property
    def contested(self) -> bool:
        return bool(self._waiting)

    @property
    def in_flight(self) -> int:
        """Number of requests that have a slot, wait for one or are expected."""
        return len(self._expected) + len(self._waiting) + self._arena.slots - len(self._free)

    def expect(self, waiter: SlotWaiter) -> None:
        """Count a waiter that will `take` a slot or `leave` later. One that waits for a slot stops waiting."""
        self._waiting.pop(waiter, None)
        self._expected.add(waiter)

    def take(self, waiter: SlotWaiter) -> None:
        """Give `waiter` a slot, now or as soon as one is free."""
        self._expected.discard(waiter)
        self._waiting[waiter] = None
        self._give()

    def leave(self, waiter: SlotWaiter) -> None:
        """Forget a waiter that does not need a slot any more."""
        self._expected.discard(waiter)
        self._waiting.pop(waiter, None)
        self._notify_if_idle()

    def give_back(self, slot: int, request_size: int, answer_size: int) -> None:
        """Free the slot of a request that was answered or whose client has disconnected."""
        self._arena.give_back(slot, request_size, answer_size)
        self._free.append(slot)
        self._give()
        self._notify_if_idle()

    def _notify_if_idle(self) -> None:
        if not self.in_flight:
            self._all_answered.set()

    def _give(self) -> None:
        # `begin_body` may give the slot back before it returns, which calls this again: the loop below continues.
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
        if not self.in_flight:
            return True
        self._all_answered.clear()
        return await wait_for_event(self._all_answered, limit_s)


# Bodies that are not in the arena

MAX_SIDE_BYTES = 512 * 1024 * 1024
"""Limit of them together, in bytes. Side buffers count at their full size; bodies of other ports count by what has come
of them and what it takes to read it, for raw tensors three times as much."""

MOST_UNSEEN = 8
"""Most messages that are received at a time by a library that shows them when they are complete, as gRPC does."""


class BodySender(Protocol):
    """A connection whose body is received outside the arena."""

    @property
    def slow(self) -> bool:
        """Whether the last check found that the body arrives too slowly."""

    @property
    def bytes_to_come(self) -> int:
        """Bytes of the body that have not arrived yet."""

    def refuse_body(self) -> None:
        """Answer that there is no room for the body, or disconnect, and drop what has come of it."""


class SideMemory:
    """Room for the bodies of all ports that are not in the arena, `most` bytes together.

    When a sender needs room, the slow sender with the most bytes to come is refused, even if it has some: for a buffer
    only if both are slow. Senders that are not slow keep theirs.

    - `unseen`: held while a message is received whose bytes are not seen, nor counted, before it is complete.
    """

    def __init__(self, most: int = MAX_SIDE_BYTES) -> None:
        self.unseen = asyncio.Semaphore(MOST_UNSEEN)
        self.most = most
        self._sizes: dict[BodySender, int] = {}

    @property
    def size(self) -> int:
        return sum(self._sizes.values())

    def take(self, sender: BodySender, size: int) -> memoryview | None:
        """Return a buffer of `size` bytes, which is kept until `give_back`; None if there is no room.

        Only pages that are written use memory.
        """
        if (self.size + size > self.most and not sender.slow) or not self.grow(sender, size):
            return None
        return memoryview(mmap.mmap(-1, size))

    def grow(self, sender: BodySender, size: int) -> bool:
        """Count `size` more bytes for `sender`, until `give_back`; False if there is no room."""
        if self._sizes.get(sender, 0) + size > self.most:
            return False
        while self.size + size > self.most:
            slow = [one for one in (sender, *self._sizes) if one.slow]
            worst = max(slow, key=lambda one: one.bytes_to_come, default=sender)
            if worst is sender:
                return False
            del self._sizes[worst]
            worst.refuse_body()
        self._sizes[sender] = self._sizes.get(sender, 0) + size
        return True

    def give_back(self, sender: BodySender) -> None:
        """Free what `sender` has."""
        self._sizes.pop(sender, None)


# Stalled clients

STALL_CHECK_S = 1.0
"""Seconds between two checks of all clients."""

MAX_STALLED_CHECKS = 30
"""A client is disconnected after so many checks in a row in which the teacher waited for it and it moved no byte: of a
request, of an answer, or of its first request (with the token, if one is required)."""

MAX_STALLED_CHECKS_CONTESTED = 3
"""The limit for a client that holds a slot while others wait for one, which has to move `MIN_BYTES_CONTESTED` between
checks. A request's body that is slower is moved to a side buffer at the first check; without room, the client is
disconnected at this limit. A client that moved nothing for so many checks is also the first to be disconnected when a
new client exceeds the limit of connections."""

MIN_BYTES_CONTESTED = 256 * 1024


class ClientProgress(NamedTuple):
    """What the teacher waits for (`turn`), and how many bytes of it have moved so far."""

    turn: object
    moved: int


class StallDetector:
    """Compares the progress of one client between checks.

    - `checks`: number of checks in a row, the last included, that found too few bytes moved.
    - `moved`: bytes between the last two; None unless the teacher waited for the same thing at both.
    """

    def __init__(self) -> None:
        self.checks = 0
        self.moved: int | None = None
        self._seen: ClientProgress | None = None

    def check(self, progress: ClientProgress | None, least: int = 1) -> int:
        """Return the number of checks in a row that found less than `least` bytes moved.

        `progress` is None while the teacher does not wait for the client.
        """
        self.moved = self._moved_since(progress)
        self.checks = self.checks + 1 if self.moved is not None and self.moved < least else 0
        self._seen = progress
        return self.checks

    def current(self, progress: ClientProgress | None) -> int:
        """Return what the last check found, or 0 if a byte has moved since."""
        moved = self._moved_since(progress)
        return self.checks if moved is not None and moved < 1 else 0

    def _moved_since(self, progress: ClientProgress | None) -> int | None:
        if progress is None or self._seen is None or progress.turn != self._seen.turn:
            return None
        return progress.moved - self._seen.moved


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Return how many of the written bytes the client's machine has not acknowledged.

    The kernel's send buffer counts where it can be read: asyncio's own buffer may not shrink while that one drains.
    """
    ours = transport.get_write_buffer_size()
    connected = transport.get_extra_info("socket")
    system = array.array("i", [0])
    try:
        fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, system)
    except OSError:
        return ours
    return ours + system[0]
