"""How the ranks of a new generation meet: all tell rank 0 who they are, and hear who the others are."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from edl_runtime.elastic.channel import Unpacker, pack
from edl_runtime.errors import GroupLostError
from edl_runtime.protocol.address import endpoint_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from edl_runtime.elastic.messages import Join

LOOK_EVERY_S = 0.005
"""How often those who are earlier than rank 0 look whether it is there."""

GUEST_LIMIT_S = 1.0
"""How long whoever comes may take to say who it is."""

Said = TypeVar("Said", bound=msgspec.Struct)


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says. `name`: of its process. `step`: of the state that it has, None before it has trained."""

    generation: int
    rank: int
    name: str
    step: int | None


class Met(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks hear. `names`, `steps`: by rank. `store_port`: where rank 0's store of this generation listens."""

    generation: int
    names: list[str]
    steps: list[int | None]
    store_port: int


class Meeting:
    """One meeting, of this rank with all others. `abort` may be called by any thread and lets `hold` raise."""

    def __init__(self, join: Join) -> None:
        self._join = join
        self._ends: list[socket.socket] = []
        self._aborted = False

    def abort(self) -> None:
        self._aborted = True
        for end in tuple(self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def hold(self, name: str, step: int | None, open_store: Callable[[], int], timeout_s: float) -> Met:
        """Return what all ranks have said, when all have. Rank 0 calls `open_store`, which returns the store's port.

        Raises GroupLostError when not all come within `timeout_s`, or one goes.
        """
        here = Here(generation=self._join.generation, rank=self._join.rank, name=name, step=step)
        until = time.monotonic() + timeout_s
        try:
            return self._host(here, open_store, until) if self._join.rank == 0 else self._visit(here, until)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise GroupLostError(self._join.generation, f"the ranks could not meet: {error}") from error
        finally:
            for end in self._ends:
                end.close()

    def _host(self, here: Here, open_store: Callable[[], int], until: float) -> Met:
        host, port = endpoint_of(self._join.store, "store")
        there = {0: here}
        guests: dict[int, socket.socket] = {}
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = self._own(socket.create_server((host, port), family=family, backlog=64))
        while len(there) < self._join.world_size:
            guest = self._own(self._accept(listener, until))
            guest.settimeout(min(GUEST_LIMIT_S, _left(until)))
            with contextlib.suppress(OSError, EOFError, msgspec.DecodeError):  # whoever goes again was no guest
                said = _hear(guest, Here)
                if said.generation == here.generation and 0 < said.rank < self._join.world_size:
                    there[said.rank] = said
                    guests[said.rank] = guest
                    continue
            guest.close()
        met = Met(
            generation=here.generation,
            names=[there[rank].name for rank in sorted(there)],
            steps=[there[rank].step for rank in sorted(there)],
            store_port=open_store(),
        )
        for guest in guests.values():
            guest.sendall(pack(met))
        return met

    def _accept(self, listener: socket.socket, until: float) -> socket.socket:
        listener.settimeout(_left(until))
        guest, _ = listener.accept()
        return guest

    def _visit(self, here: Here, until: float) -> Met:
        """Ask until rank 0 is there: who listens may still be a meeting of an older generation."""
        address = endpoint_of(self._join.store, "store")
        while True:
            try:
                self._ends.clear()
                with self._own(socket.create_connection(address, _left(until))) as end:
                    end.settimeout(_left(until))
                    end.sendall(pack(here))
                    met = _hear(end, Met)
                    if met.generation == here.generation:
                        return met
            except (OSError, EOFError):
                _left(until)
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
        raise TimeoutError("not all ranks came in time")
    return left


def _hear(end: socket.socket, kind: type[Said]) -> Said:
    unpacker: Unpacker[Said] = Unpacker(kind)
    while data := end.recv(1 << 16):
        for said in unpacker.feed(data):
            return said
    raise EOFError("the other rank is gone")
