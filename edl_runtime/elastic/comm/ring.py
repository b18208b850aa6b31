"""A group's ring: each rank's connections with the rank before it and the one after it.

A sum goes around twice, in pieces: once to be added up, once to be shared. So each rank sends and receives less than
twice the array, however many ranks there are.
"""

from __future__ import annotations

import select
import socket
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE_BYTES = 1 << 18
"""Arrays are added up in pieces of about so many bytes, which stay in the processor's cache."""


class Ring:
    """One rank's part in the ring. `before`, `after`: connected sockets; whoever opened them closes them.

    Each method waits for other ranks without a timeout, and raises OSError, EOFError when a connection ends.
    """

    def __init__(self, rank: int, world_size: int, *, before: socket.socket, after: socket.socket) -> None:
        self._rank = rank
        self._world_size = world_size
        self._before = before
        self._after = after

    def send(self, values: NDArray[np.uint8]) -> None:
        """Send bytes to the rank after this one, which has to `receive` as many."""
        self._after.sendall(values.data)

    def receive(self, values: NDArray[np.uint8]) -> None:
        """Fill `values` with bytes of the rank before this one."""
        room = values.data
        while room:
            room = room[_read(self._before, room) :]

    def all_reduce(self, values: NDArray[Any]) -> None:
        """Replace the values of a contiguous array by their sums over all ranks: the same bits everywhere.

        All ranks call it with arrays of one type and size, of at least one value for each rank.
        """
        size = self._world_size
        count = -(-values.nbytes // (size * PIECE_BYTES))
        segments = [np.array_split(segment, count) for segment in np.array_split(values.reshape(-1), size)]
        # In each turn a rank sends one segment and receives the one before it. After `size - 1` turns it has the sum of
        # the segment that it received last; in the other turns it receives sums.
        pieces = [piece for turn in range(2 * size - 1) for piece in segments[(self._rank - turn) % size]]
        to_send, to_add, end = len(pieces) - count, size * count, len(pieces)
        room = np.empty_like(segments[0][0])

        def target(number: int) -> memoryview:
            """Return where the piece with this number is received."""
            return _bytes(pieces[number] if number >= to_add else room[: len(pieces[number])])

        sent, received = 0, count
        outgoing, incoming = _bytes(pieces[0]), target(count)
        while sent < to_send or received < end:
            sends, receives = sent < min(to_send, received), received < end  # it has to receive what it passes on
            gone = _send_now(self._after, outgoing) if sends else 0
            come = _receive_now(self._before, incoming) if receives else 0
            if not gone and not come:
                self._wait(sends=sends, receives=receives)
            outgoing, incoming = outgoing[gone:], incoming[come:]
            if gone and not outgoing:
                sent += 1
                outgoing = _bytes(pieces[sent])
            if come and not incoming:
                if received < to_add:
                    np.add(pieces[received], room[: len(pieces[received])], out=pieces[received])
                received += 1
                incoming = target(received) if received < end else incoming

    def _wait(self, *, sends: bool, receives: bool) -> None:
        """Wait until bytes can be sent or have arrived."""
        waited_for = select.poll()
        if sends:
            waited_for.register(self._after, select.POLLOUT)
        if receives:
            waited_for.register(self._before, select.POLLIN)
        waited_for.poll()


def _bytes(values: NDArray[Any]) -> memoryview:
    return values.data.cast("B")


def _read(end: socket.socket, room: memoryview, flags: int = 0) -> int:
    count = end.recv_into(room, 0, flags)
    if not count:
        raise EOFError("the connection to the rank before has ended")
    return count


def _receive_now(end: socket.socket, room: memoryview) -> int:
    try:
        return _read(end, room, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0


def _send_now(end: socket.socket, values: memoryview) -> int:
    try:
        return end.send(values, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0
