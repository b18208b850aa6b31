"""How the ranks of a new generation connect: each sends Hello to rank 0, then to the rank after it.

The connections to rank 0 stay as control channel, those to the next rank as ring.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from edl_runtime.elastic.comm.agent_protocol import MAX_MESSAGE_BYTES, JoinGeneration, MessageDecoder, encode_message
from edl_runtime.elastic.comm.ring import Ring
from edl_runtime.elastic.errors import GroupLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator


RETRY_EVERY_S = 0.005
"""How often a rank of a small group tries to connect while rank 0 is not there yet; the larger the group, the rarer."""

HELLO_LIMIT_S = 1.0
"""How long a connection may take to send its Hello."""

CONNECT_LIMIT_S = 1.0
"""Timeout of one try to connect to rank 0: `abort` takes effect between two."""

POLL_EVERY_S = 0.05
"""How often rank 0 checks for connections that took too long."""

EXTRA_PENDING = 64
"""Connections without Hello that are allowed beside two for each rank."""

MAX_HELLO_BYTES = 1 << 10

ACCEPTED = b"A"
"""What a rank of the ring answers to the Hello of the one before it, which else connects again."""

MessageT = TypeVar("MessageT", bound=msgspec.Struct)
Number = TypeVar("Number", bound=np.number[Any])


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank sends. `token`: its generation's secret. `name`: of its process.

    - `step`: of the state that it has, None before it has trained.
    - `endpoint`: host and port where it listens for the rank before it.
    """

    generation: int
    rank: int
    name: str
    step: int | None
    token: str
    endpoint: tuple[str, int] = ("", 0)


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's answer to all. `names`, `steps`, `endpoints`: by rank. `store_port`: of its store for NCCL, or 0."""

    generation: int
    names: list[str]
    steps: list[int | None]
    endpoints: list[tuple[str, int]]
    store_port: int


class Bootstrap:
    """Connects this rank with the others of a generation. Any thread may call `abort`: whatever waits then raises.

    `host`: the address at which the others reach this rank.
    """

    def __init__(self, join: JoinGeneration, host: str = "127.0.0.1", root: socket.socket | None = None) -> None:
        """`root`: where rank 0 listens already, if it does."""
        self._join = join
        self._host = host
        self._root = root
        self._ends: list[socket.socket] = [root] if root else []
        self._aborted = False

    def abort(self) -> None:
        self._aborted = True
        for end in tuple(self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections; ranks that still use them notice."""
        ends, self._ends = self._ends, []
        for end in ends:
            end.close()

    def run(self, name: str, step: int | None, open_store: Callable[[], int]) -> tuple[Welcome, ControlChannel]:
        """Return what all ranks have sent, once all have, and the channel that connects them.

        Rank 0 calls `open_store`, which returns the store's port. Has no timeout: agents know which worker still makes
        progress and call `abort` when one does not. Raises GroupLostError then, and when a rank goes.
        """
        join = self._join
        with self._group_lost_on_error():
            self._listener = self._listen((self._host, 0))
            self._own = Hello(
                generation=join.generation,
                rank=join.rank,
                name=name,
                step=step,
                token=join.token,
                endpoint=(self._host, self._listener.getsockname()[1]),
            )
            welcome, ends = self._run_root(open_store) if join.rank == 0 else self._join_root()
        return welcome, ControlChannel(ends)

    def connect_ring(self, welcome: Welcome) -> Ring:
        """Return the ring of the ranks that `run` has connected. Has no timeout and raises GroupLostError, as `run`."""
        rank, size = self._join.rank, self._join.world_size
        endpoint = welcome.endpoints[(rank + 1) % size]
        with self._group_lost_on_error():
            if rank % 2:  # odd ranks listen first, so that no rank waits for one that waits for it
                before = self._accept_before()
                after = self._connect_after(endpoint)
            else:
                after = self._connect_after(endpoint)
                before = self._accept_before()
            for end in (before, after):
                configure_socket(end)
            if sys.platform == "linux":  # keepalive finds no network that is cut while data is on its way
                after.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000)
        return Ring(rank, size, before=before, after=after)

    @contextlib.contextmanager
    def _group_lost_on_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self.close()
            raise GroupLostError(self._join.generation, f"the ranks could not meet: {error}") from error

    def _run_root(self, open_store: Callable[[], int]) -> tuple[Welcome, dict[int, socket.socket]]:
        root = self._root or self._listen(self._join.address)
        found = self._accept(root, range(1, self._join.world_size))
        hellos = [self._own, *(found[rank][1] for rank in sorted(found))]
        welcome = Welcome(
            generation=self._own.generation,
            names=[hello.name for hello in hellos],
            steps=[hello.step for hello in hellos],
            endpoints=[hello.endpoint for hello in hellos],
            store_port=open_store(),
        )
        message = encode_message(welcome)
        for peer, _ in found.values():
            peer.settimeout(None)
            peer.sendall(message)
        return welcome, {rank: peer for rank, (peer, _) in found.items()}

    def _join_root(self) -> tuple[Welcome, dict[int, socket.socket]]:
        """Retry until rank 0 answers: the listener there may belong to an older generation."""
        while True:
            end = self._connect(self._join.address)
            with contextlib.suppress(EOFError, OSError):
                welcome = _receive_message(end, Welcome)
                if welcome.generation == self._own.generation:
                    return welcome, {0: end}
            self._retry(end)

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        """Return a connection that has sent this rank's Hello. Retries until `abort`."""
        while True:
            end = None
            try:
                end = self._register(socket.create_connection(address, CONNECT_LIMIT_S))
                end.sendall(encode_message(self._own))
            except (OSError, EOFError):
                self._retry(end)
            else:
                return end

    def _connect_after(self, endpoint: tuple[str, int]) -> socket.socket:
        """Return a connection that the next rank has accepted, which closes those whose Hello is late.

        Retries until `abort`.
        """
        while not _is_accepted(end := self._connect(endpoint)):
            self._retry(end)
        return end

    def _accept_before(self) -> socket.socket:
        ((end, _),) = self._accept(self._listener, [(self._join.rank - 1) % self._join.world_size]).values()
        end.sendall(ACCEPTED)
        return end

    def _retry(self, end: socket.socket | None) -> None:
        """Close this connection, and wait until it is time for the next. Raises EOFError after `abort`."""
        if self._aborted:
            raise EOFError("a rank was lost")
        if end:
            self._ends.remove(end)
            end.close()
        # all of a large group that wait for rank 0 would else take the processor from it
        time.sleep(RETRY_EVERY_S * (1 + self._join.world_size // 8))

    def _listen(self, address: tuple[str, int]) -> socket.socket:
        return self._register(listen(address, self._join.world_size))

    def _accept(self, listener: socket.socket, ranks: Collection[int]) -> dict[int, tuple[socket.socket, Hello]]:
        """Return the connections of these ranks and what they have sent, by rank. Closes all others."""
        found: dict[int, tuple[socket.socket, Hello]] = {}
        with listener, _PendingPeers(listener, 2 * len(ranks) + EXTRA_PENDING) as pending:
            while len(found) < len(ranks):
                for peer, hello in pending.completed():
                    if self._is_expected(hello) and hello.rank in ranks and hello.rank not in found:  # the first counts
                        found[hello.rank] = self._register(peer), hello
                    else:
                        peer.close()
        return found

    def _is_expected(self, hello: Hello) -> bool:
        knows = hmac.compare_digest(hello.token.encode(), self._join.token.encode())
        return knows and hello.generation == self._join.generation

    def _register(self, end: socket.socket) -> socket.socket:
        self._ends.append(end)
        if self._aborted:
            end.close()
            raise EOFError("a rank was lost")
        return end


class _PendingPeers:
    """The connections to rank 0 that have not sent their Hello yet, all read at once.

    Above `most` the oldest is closed; a real rank connects again.
    """

    def __init__(self, listener: socket.socket, most: int) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._most = most
        self._there: dict[socket.socket, _PendingPeer] = {}  # by arrival
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in tuple(self._there):
            self._forget(end)
            end.close()
        self._selector.close()

    def completed(self) -> Iterator[tuple[socket.socket, Hello]]:
        """Wait for a moment, and yield connections whose Hello has arrived.

        Raises OSError once the listener is shut down.
        """
        for key, _ in self._selector.select(POLL_EVERY_S):
            end = key.fileobj
            if end is self._listener:
                self._accept()
            elif isinstance(end, socket.socket) and end in self._there and (hello := self._receive(end)) is not None:
                self._forget(end)
                yield end, hello
        now = time.monotonic()
        for end in [end for end, pending in self._there.items() if pending.until < now]:
            self._disconnect(end)

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone already
            return
        end.setblocking(False)
        self._there[end] = _PendingPeer(MessageDecoder(Hello), time.monotonic() + HELLO_LIMIT_S)
        self._selector.register(end, selectors.EVENT_READ)
        if len(self._there) > self._most:
            self._disconnect(next(iter(self._there)))

    def _receive(self, end: socket.socket) -> Hello | None:
        """Return the Hello once it is complete; close the connection if it sends anything else, or ends."""
        pending = self._there[end]
        try:
            data = end.recv(min(pending.unpacker.missing, MAX_HELLO_BYTES - pending.size))
            pending.size += len(data)
            hello = next(pending.unpacker.feed(data), None)
        except BlockingIOError:
            return None
        except (OSError, msgspec.DecodeError):
            data, hello = b"", None
        if hello is None and (not data or pending.size == MAX_HELLO_BYTES):
            self._disconnect(end)
        return hello

    def _forget(self, end: socket.socket) -> None:
        self._selector.unregister(end)
        del self._there[end]

    def _disconnect(self, end: socket.socket) -> None:
        self._forget(end)
        end.close()


@dataclass
class _PendingPeer:
    unpacker: MessageDecoder[Hello]
    until: float  # its Hello has to be complete by then
    size: int = 0  # bytes so far


def listen(address: tuple[str, int], ranks: int) -> socket.socket:
    """Return a socket at which so many ranks may connect before the first is accepted. Raises OSError."""
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server(address, family=family, backlog=max(64, ranks))


def _is_accepted(end: socket.socket) -> bool:
    """Wait for the answer to a Hello, and return whether it came, before the other rank closed the connection."""
    end.settimeout(None)
    try:
        return end.recv(1) == ACCEPTED
    except OSError:
        return False


def _receive_message(end: socket.socket, kind: type[MessageT]) -> MessageT:
    """Read one message of at most MAX_MESSAGE_BYTES, without a timeout."""
    unpacker: MessageDecoder[MessageT] = MessageDecoder(kind)
    room = MAX_MESSAGE_BYTES
    end.settimeout(None)
    while room > 0:
        data = end.recv(min(room, 1 << 16))
        if not data:
            raise EOFError("the other rank is gone")
        room -= len(data)
        for hello in unpacker.feed(data):
            return hello
    raise msgspec.DecodeError(f"more than {MAX_MESSAGE_BYTES} bytes")


# The control channel: what rank 0 sums.

UNREACHABLE_S = 10
"""How long another rank's host may be unreachable. Its kernel also answers for a stopped process."""


class ControlChannel:
    """Rank 0's sockets to all others, or another rank's to rank 0: two messages a rank, for sums of a few values.

    A sum waits for all ranks without a timeout.
    """

    def __init__(self, ends: Mapping[int, socket.socket]) -> None:
        """Use connected sockets, by the rank at the other end; whoever opened them closes them."""
        self._ends = dict(ends)
        for end in self._ends.values():
            configure_socket(end)

    def all_reduce(self, own: NDArray[Number]) -> NDArray[Number]:
        """Return the sums over all ranks, the same bits everywhere. Raises OSError, EOFError when a connection ends."""
        if 0 in self._ends:
            self._ends[0].sendall(own.tobytes())
            return np.frombuffer(self._receive(own.nbytes)[0], own.dtype).copy()
        received = self._receive(own.nbytes)
        parts = [np.frombuffer(received[rank], own.dtype) for rank in sorted(received)]
        total: NDArray[Number] = np.add.reduce([own, *parts], dtype=own.dtype)
        for end in self._ends.values():
            end.sendall(total.tobytes())
        return total

    def _receive(self, size: int) -> dict[int, bytes]:
        """Return `size` bytes of each rank; a rank that goes is noticed at once, however late the others are."""
        received = dict.fromkeys(self._ends, b"")
        ranks = {end.fileno(): rank for rank, end in self._ends.items()}
        readable = select.poll()
        for descriptor in ranks:
            readable.register(descriptor, select.POLLIN)
        while any(len(part) < size for part in received.values()):
            for descriptor, _ in readable.poll():
                rank = ranks[descriptor]
                data = self._ends[rank].recv(size - len(received[rank]))
                if not data:
                    raise EOFError(f"the connection to rank {rank} has ended")
                received[rank] += data
        return received


UNACKNOWLEDGED_S = 30
"""How long bytes of a sum or a state may wait to be received: a rank that takes so long is not in it any more."""


def configure_socket(end: socket.socket) -> None:
    """Wait without a timeout, send small messages at once, and detect a network that is cut."""
    end.settimeout(None)
    if end.family == socket.AF_UNIX:
        return
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNREACHABLE_S // 2)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, UNREACHABLE_S // 2)
