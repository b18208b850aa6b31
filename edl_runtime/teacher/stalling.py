"""How it is noticed that a client does not do its part."""

from __future__ import annotations

import array
import asyncio
import fcntl
import termios
from typing import NamedTuple

LOOK_S = 1.0
"""How often a teacher looks at its clients."""

STALL_LOOKS = 30
"""A client is disconnected when it is its turn and so many looks in a row find that it has done nothing: neither sent
more of a request nor taken more of an answer, nor yet made a request (with the token, if one is asked for)."""

AWAITED_LOOKS = 3
"""In place of these for one that holds a slot while others wait for one: then it has to move `AWAITED_BYTES` a look.
Of a request it moves less only once: then the body is received beside the slots, and it goes if there is no room. And
after so many in which it has done nothing, it goes when a new client is one too many."""

AWAITED_BYTES = 256 * 1024


class Progress(NamedTuple):
    """How far a client is: with what, and how many bytes of that have gone from or to it. These grow."""

    turn: object
    moved: int


class Stall:
    """What the looks at one client tell.

    - `looks`: how many in a row have found less than they ask for, up to the last.
    - `moved`: bytes between the last two; None if the client had no part then, or another one.
    """

    def __init__(self) -> None:
        self.looks = 0
        self.moved: int | None = None
        self._seen: Progress | None = None

    def look(self, progress: Progress | None, least: int = 1) -> int:
        """Return how many looks in a row have found less than `least` bytes moved.

        `progress` is None while it is not the client's turn.
        """
        self.moved = self._moved_since(progress)
        self.looks = self.looks + 1 if self.moved is not None and self.moved < least else 0
        self._seen = progress
        return self.looks

    def lasts(self, progress: Progress | None) -> int:
        """Return what the last look found, or 0 if a byte has moved since."""
        moved = self._moved_since(progress)
        return self.looks if moved is not None and moved < 1 else 0

    def _moved_since(self, progress: Progress | None) -> int | None:
        if progress is None or self._seen is None or progress.turn != self._seen.turn:
            return None
        return progress.moved - self._seen.moved


def untaken(transport: asyncio.Transport) -> int:
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
