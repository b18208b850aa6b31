"""How the ranks of a new generation meet: all tell rank 0 who they are, and hear who the others are."""

from __future__ import annotations

import contextlib
import hmac
import socket
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from edl_runtime.elastic.channel import LONGEST, Unpacker, pack
from edl_runtime.elastic.star import Star
from edl_runtime.errors import GroupLostError
from edl_runtime.protocol.address import endpoint_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from edl_runtime.elastic.messages import Join

LOOK_EVERY_S = 0.005
"""How often those who are earlier than rank 0 look whether it is there."""

GUEST_LIMIT_S = 1.0
"""How long whoever comes may take to say who it is."""

CONNECT_LIMIT_S = 1.0
"""How long one try to reach rank 0 takes: `abort` is heard between two."""

LONGEST_HERE = 1 << 10

Said = TypeVar("Said", bound=msgspec.Struct)


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says. `word`: of its generation, which strangers do not know. `name`: of its process.

    `step`: of the state that it has, None before it has trained.
    """

    generation: int
    rank: int
    name: str
    step: int | None
    word: str


class Met(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks hear. `names`, `steps`: by rank. `store_port`: where rank 0's store of this generation listens."""

    generation: int
    names: list[str]
    steps: list[int | None]
    store_port: int


class Meeting:
    """One meeting, of this rank with all others, and what connects them until it is closed.

    `abort` may be called by any thread: whatever waits for others raises.
    """

    def __init__(self, join: Join) -> None:
        self._join = join
        self._ends: list[socket.socket] = []
        self._aborted = False

    def abort(self) -> None:
        self._aborted = True
        for end in tuple(self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the others. They notice, if they sum still."""
        ends, self._ends = self._ends, []
        for end in ends:
            end.close()

    def hold(self, name: str, step: int | None, open_store: Callable[[], int]) -> tuple[Met, Star]:
        """Return what all ranks have said, when all have, and what connects them from then on.

        Rank 0 calls `open_store`, which returns the store's port. Waits for as long as it takes: agents know who comes
        on, and `abort` when one does not. Raises GroupLostError then, and when a rank goes.
        """
        join = self._join
        here = Here(generation=join.generation, rank=join.rank, name=name, step=step, word=join.word)
        try:
            met, ends = self._host(here, open_store) if join.rank == 0 else self._visit(here)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self.close()
            raise GroupLostError(join.generation, f"the ranks could not meet: {error}") from error
        return met, Star(ends)

    def _host(self, here: Here, open_store: Callable[[], int]) -> tuple[Met, dict[int, socket.socket]]:
        host, port = endpoint_of(self._join.store, "store")
        there = {0: here}
        guests: dict[int, socket.socket] = {}
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with self._own(socket.create_server((host, port), family=family, backlog=64)) as listener:
            while len(there) < self._join.world_size:
                guest = self._own(listener.accept()[0])
                said = self._greet(guest)
                if said is None or said.rank in there:  # of two who say the same rank the first counts
                    guest.close()
                    continue
                there[said.rank] = said
                guests[said.rank] = guest
        met = Met(
            generation=here.generation,
            names=[there[rank].name for rank in sorted(there)],
            steps=[there[rank].step for rank in sorted(there)],
            store_port=open_store(),
        )
        for guest in guests.values():
            guest.settimeout(None)
            guest.sendall(pack(met))
        return met, guests

    def _greet(self, guest: socket.socket) -> Here | None:
        """Return what a rank of this generation says, None for anybody else."""
        try:
            said = _hear(guest, Here, LONGEST_HERE, time.monotonic() + GUEST_LIMIT_S)
        except (OSError, EOFError, msgspec.DecodeError):  # whoever goes again was no guest
            return None
        knows = hmac.compare_digest(said.word.encode(), self._join.word.encode())
        expected = said.generation == self._join.generation and 0 < said.rank < self._join.world_size
        return said if knows and expected else None

    def _visit(self, here: Here) -> tuple[Met, dict[int, socket.socket]]:
        """Ask until rank 0 is there: who listens may still be a meeting of an older generation."""
        address = endpoint_of(self._join.store, "store")
        while True:
            self.close()
            try:
                end = self._own(socket.create_connection(address, CONNECT_LIMIT_S))
                end.sendall(pack(here))
                met = _hear(end, Met, LONGEST)
                if met.generation == here.generation:
                    return met, {0: end}
            except (OSError, EOFError):
                if self._aborted:
                    raise
            time.sleep(LOOK_EVERY_S)

    def _own(self, end: socket.socket) -> socket.socket:
        self._ends.append(end)
        if self._aborted:
            end.close()
            raise EOFError("a rank was lost")
        return end


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long to say who it is")
    return left


def _hear(end: socket.socket, kind: type[Said], longest: int, until: float | None = None) -> Said:
    """Return the one thing that the other end says, in so many bytes at most and all of it until then, if ever."""
    unpacker: Unpacker[Said] = Unpacker(kind)
    room = longest
    while room > 0:
        end.settimeout(None if until is None else _left(until))
        data = end.recv(min(room, 1 << 16))
        if not data:
            raise EOFError("the other rank is gone")
        room -= len(data)
        for said in unpacker.feed(data):
            return said
    raise msgspec.DecodeError(f"more than {longest} bytes")
