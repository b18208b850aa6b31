"""How the ranks of a new generation meet: all tell rank 0 who they are, and hear who the others are."""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import time
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from edl_runtime.elastic.channel import LONGEST, Unpacker, pack
from edl_runtime.elastic.star import Star
from edl_runtime.errors import GroupLostError
from edl_runtime.protocol.address import endpoint_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edl_runtime.elastic.messages import Join

LOOK_EVERY_S = 0.005
"""How often those who are earlier than rank 0 look whether it is there."""

GUEST_LIMIT_S = 1.0
"""How long whoever comes may take to say who it is."""

CONNECT_LIMIT_S = 1.0
"""How long one try to reach rank 0 takes: `abort` is heard between two."""

HEAR_EVERY_S = 0.05
"""How often it is looked for those who took too long."""

MORE_STRANGERS = 64
"""How many may say nothing beside twice as many as there are ranks."""

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
        listener = self._own(socket.create_server((host, port), family=family, backlog=64))
        with listener, _Strangers(listener, 2 * self._join.world_size + MORE_STRANGERS) as strangers:
            while len(there) < self._join.world_size:
                for guest, said in strangers.heard():
                    if self._is_expected(said) and said.rank not in there:  # of two of the same rank the first counts
                        there[said.rank], guests[said.rank] = said, self._own(guest)
                    else:
                        guest.close()
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

    def _is_expected(self, said: Here) -> bool:
        """Whether a rank of this generation says that."""
        knows = hmac.compare_digest(said.word.encode(), self._join.word.encode())
        return knows and said.generation == self._join.generation and 0 < said.rank < self._join.world_size

    def _visit(self, here: Here) -> tuple[Met, dict[int, socket.socket]]:
        """Ask until rank 0 is there: who listens may still be a meeting of an older generation."""
        address = endpoint_of(self._join.store, "store")
        while True:
            self.close()
            try:
                end = self._own(socket.create_connection(address, CONNECT_LIMIT_S))
                end.sendall(pack(here))
                met = _hear(end, Met)
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


class _Strangers:
    """Those who have connected to rank 0 and have yet to say who they are: all are heard at once.

    There are `most` of them; beyond, the oldest is disconnected, which comes again if it is a rank.
    """

    def __init__(self, listener: socket.socket, most: int) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._most = most
        self._there: dict[socket.socket, _Stranger] = {}  # by arrival
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in tuple(self._there):
            self._forget(end)
            end.close()
        self._selector.close()

    def heard(self) -> Iterator[tuple[socket.socket, Here]]:
        """Wait for a moment, and hand over those that have said meanwhile who they are, and what they say.

        Raises OSError when the listener has been shut.
        """
        for key, _ in self._selector.select(HEAR_EVERY_S):
            end = key.fileobj
            if end is self._listener:
                self._accept()
            elif isinstance(end, socket.socket) and end in self._there and (said := self._hear(end)) is not None:
                self._forget(end)
                yield end, said
        now = time.monotonic()
        for end in [end for end, stranger in self._there.items() if stranger.until < now]:
            self._dismiss(end)

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone already
            return
        end.setblocking(False)
        self._there[end] = _Stranger(Unpacker(Here), time.monotonic() + GUEST_LIMIT_S)
        self._selector.register(end, selectors.EVENT_READ)
        if len(self._there) > self._most:
            self._dismiss(next(iter(self._there)))

    def _hear(self, end: socket.socket) -> Here | None:
        """Return what it has said once that is whole; disconnect whoever says anything else, or goes."""
        stranger = self._there[end]
        try:
            data = end.recv(LONGEST_HERE - stranger.size)
            stranger.size += len(data)
            said = next(stranger.unpacker.feed(data), None)
        except BlockingIOError:
            return None
        except (OSError, msgspec.DecodeError):
            data, said = b"", None
        if said is None and (not data or stranger.size == LONGEST_HERE):
            self._dismiss(end)
        return said

    def _forget(self, end: socket.socket) -> None:
        self._selector.unregister(end)
        del self._there[end]

    def _dismiss(self, end: socket.socket) -> None:
        self._forget(end)
        end.close()


class _Stranger:
    """What one of them has said so far, how many bytes that is, and until when it has to have said all."""

    def __init__(self, unpacker: Unpacker[Here], until: float) -> None:
        self.unpacker = unpacker
        self.until = until
        self.size = 0


def _hear(end: socket.socket, kind: type[Said]) -> Said:
    """Return the one thing that rank 0 says, in `LONGEST` bytes at most, if ever."""
    unpacker: Unpacker[Said] = Unpacker(kind)
    room = LONGEST
    end.settimeout(None)
    while room > 0:
        data = end.recv(min(room, 1 << 16))
        if not data:
            raise EOFError("the other rank is gone")
        room -= len(data)
        for said in unpacker.feed(data):
            return said
    raise msgspec.DecodeError(f"more than {LONGEST} bytes")
