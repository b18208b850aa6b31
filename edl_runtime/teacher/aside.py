"""Memory beside the slots, for bodies that come too slowly to hold a slot that others wait for."""

from __future__ import annotations

import mmap
from typing import Protocol

MOST_ASIDE = 256 * 1024 * 1024
"""Bytes that the bodies in such memory may have, those included that have yet to come."""


class Sender(Protocol):
    """Whose body is received into such memory."""

    @property
    def slow(self) -> bool:
        """Whether the last look found that the body comes too slowly."""
        ...

    @property
    def to_come(self) -> int:
        """Bytes of the body that have yet to come."""
        ...

    def refuse_body(self) -> None:
        """Answer that there is no room for the body, and forget its memory."""
        ...


class Aside:
    """Gives senders memory for whole bodies, of `most` bytes in all. Only what is written takes memory of the machine.

    Where a slow sender is one too many, the slow one goes whose body has the most to come, be it one that has memory.
    One that is not slow never goes.
    """

    def __init__(self, most: int = MOST_ASIDE) -> None:
        self._most = most
        self._sizes: dict[Sender, int] = {}

    @property
    def size(self) -> int:
        """Bytes of all bodies that have memory here."""
        return sum(self._sizes.values())

    def take(self, sender: Sender, size: int) -> memoryview | None:
        """Return memory for the `size` bytes of a body, until `give_back`; None if there is no room for it."""
        if size > self._most:
            return None
        while self.size + size > self._most:
            slow = [one for one in (sender, *self._sizes) if one.slow]
            worst = max(slow, key=lambda one: one.to_come, default=sender)
            if worst is sender or not sender.slow:
                return None
            del self._sizes[worst]
            worst.refuse_body()
        self._sizes[sender] = size
        return memoryview(mmap.mmap(-1, size))

    def give_back(self, sender: Sender) -> None:
        """Forget the body of `sender`, if it has memory here."""
        self._sizes.pop(sender, None)
