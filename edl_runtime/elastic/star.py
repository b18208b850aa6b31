"""What ranks say over the sockets by which they have met: counts that rank 0 adds up, and state for who lacks it."""

from __future__ import annotations

import contextlib
import select
import socket
import sys
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

UNREACHABLE_S = 10
"""How long the system of another rank may be out of reach: it answers also for a process that is stopped."""


class Star:
    """Rank 0's sockets to all others, or another rank's to rank 0. Whoever sums waits for all, for as long as it takes.

    Gloo's collectives give up after 30 s, which it can't be told: with a sum before it all ranks begin one at once.
    """

    def __init__(self, ends: Mapping[int, socket.socket]) -> None:
        """Sum over connected sockets, each by the rank at its other end; who has opened them closes them."""
        self._ends = dict(ends)
        for end in self._ends.values():
            end.settimeout(None)
            with contextlib.suppress(OSError):  # not TCP
                _make_prompt(end)

    def sum(self, own: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums over all ranks. Raises OSError, EOFError when a connection ends or is shut down."""
        if 0 in self._ends:
            self._ends[0].sendall(own.tobytes())
            return np.frombuffer(self._hear(own.nbytes)[0], np.int64).copy()
        parts = [np.frombuffer(part, np.int64) for part in self._hear(own.nbytes).values()]
        total: NDArray[np.int64] = np.add.reduce([own, *parts], dtype=np.int64)
        for end in self._ends.values():
            end.sendall(total.tobytes())
        return total

    def send(self, values: NDArray[np.uint8], rank: int) -> None:
        """Send bytes to a rank, which has to `receive` as many. Raises OSError."""
        self._ends[rank].sendall(values.data)

    def receive(self, values: NDArray[np.uint8], rank: int) -> None:
        """Replace the bytes by what a rank sends. Raises OSError, EOFError."""
        room = values.data
        while room:
            count = self._ends[rank].recv_into(room)
            if not count:
                raise EOFError(f"the connection to rank {rank} has ended")
            room = room[count:]

    def _hear(self, size: int) -> dict[int, bytes]:
        """Return so many bytes of each; who goes meanwhile is noticed at once, whoever else is late."""
        heard = dict.fromkeys(self._ends, b"")
        ranks = {end.fileno(): rank for rank, end in self._ends.items()}
        readable = select.poll()
        for descriptor in ranks:
            readable.register(descriptor, select.POLLIN)
        while any(len(part) < size for part in heard.values()):
            for descriptor, _ in readable.poll():
                rank = ranks[descriptor]
                data = self._ends[rank].recv(size - len(heard[rank]))
                if not data:
                    raise EOFError(f"the connection to rank {rank} has ended")
                heard[rank] += data
        return heard


def _make_prompt(end: socket.socket) -> None:
    """Have small messages sent at once, and a network that is cut noticed by who waits for the other end."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNREACHABLE_S // 2)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, UNREACHABLE_S // 2)
