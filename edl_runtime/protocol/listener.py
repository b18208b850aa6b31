"""How a server accepts connections: how many at once, and which one it closes when there are too many.

A socket counts as soon as it is accepted: a client that never begins TLS still takes some 300 KB, and asyncio's own
servers don't report it before the TLS handshake is over.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Generic, Protocol, TypeVar, cast

from edl_runtime.log import get_logger

HANDSHAKE_S = 5.0
"""Time limit of TLS handshake and shutdown."""

MAX_NEW_CONNECTIONS = 256
"""Most connections at once without a valid request so far; over TLS, they take 80 MB."""

ACCEPT_AGAIN_S = 1.0
"""How long to wait after the system had no descriptor or memory for a connection."""

EVICTIONS_LOGGED_S = 1.0
"""How long closed connections are counted before their number is logged."""

_BACKLOG = 1024

log = get_logger(__name__)


class ServerConnection(Protocol):
    """An asyncio protocol that calls `handshake_done`, `mark_used` and `remove` of its `ConnectionTable`."""

    @property
    def idle(self) -> bool:
        """Whether the server has no complete request of it to answer."""
        ...

    @property
    def stalled_for(self) -> int:
        """How long the server has waited for the client, in the server's own measure; 0 if not for long."""
        ...

    def abort(self) -> None: ...


AnyConnection = TypeVar("AnyConnection", bound=ServerConnection)


class ConnectionTable(Generic[AnyConnection]):
    """The open connections of a server, those in a TLS handshake included: at most `most`.

    A client is new until its first valid request, and at most `max_new` are. If a new one is too many, the oldest new
    client is evicted; if there is no other, the client that has stalled the longest; if none has, the one that has been
    idle the longest. If all are busy, it is the new one itself, unless clients of one other address have more than half
    of the connections: then it is theirs with the latest request. Their number is logged at most once in
    `EVICTIONS_LOGGED_S`. The length is the number of all connections; iteration has those whose handshake is over.
    """

    def __init__(self, most: int, max_new: int = MAX_NEW_CONNECTIONS) -> None:
        self.most = most
        self._evicted = 0  # since it was last logged
        self._max_new = max_new
        self._new: dict[AnyConnection, socket.socket | None] = {}  # by arrival; the socket during the handshake
        self._known: dict[AnyConnection, None] = {}  # by last request
        self._addresses: dict[AnyConnection, str] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._known)

    def __iter__(self) -> Iterator[AnyConnection]:
        return iter([*(one for one, accepted in self._new.items() if accepted is None), *self._known])

    def add(self, client: AnyConnection, accepted: socket.socket) -> None:
        """Add a socket that was just accepted, and evict a connection if there are too many. For the event loop."""
        self._new[client] = accepted
        self._addresses[client] = _address(accepted)
        if len(self) <= self.most and len(self._new) <= self._max_new:
            return
        oldest = next(iter(self._new))
        self._evict(oldest if oldest is not client else self._evictable() or self._crowding(client) or client)

    def handshake_done(self, client: AnyConnection) -> None:
        """Note that its handshake is over, or that it needs none."""
        if client in self._new:
            self._new[client] = None

    def mark_used(self, client: AnyConnection) -> None:
        """Note a valid request of it."""
        if client in self._new or client in self._known:
            self._new.pop(client, None)
            self._known.pop(client, None)
            self._known[client] = None

    def remove(self, client: AnyConnection) -> None:
        """Remove a connection that has ended; may be called again."""
        self._new.pop(client, None)
        self._known.pop(client, None)
        self._addresses.pop(client, None)

    def end_handshakes(self) -> None:
        for accepted in self._new.values():
            _shut(accepted)

    def _evictable(self) -> AnyConnection | None:
        """Return the client to evict among those not new and not busy; None if all are."""
        most_stalled = max(self._known, key=lambda one: one.stalled_for, default=None)
        if most_stalled is not None and most_stalled.stalled_for:
            return most_stalled
        return next((one for one in self._known if one.idle), None)

    def _crowding(self, newest: AnyConnection) -> AnyConnection | None:
        """Return the last to ask of the other address that has more than half of all connections, if one has."""
        address, connections = Counter(self._addresses.values()).most_common(1)[0]
        if 2 * connections <= self.most or address == self._addresses[newest]:
            return None
        return next((one for one in reversed(self._known) if self._addresses[one] == address), None)

    def _evict(self, client: AnyConnection) -> None:
        if not self._evicted:
            asyncio.get_running_loop().call_later(EVICTIONS_LOGGED_S, self._log_evicted)
        self._evicted += 1
        accepted = self._new.get(client)
        self.remove(client)
        if accepted is None:
            client.abort()
        else:
            _shut(accepted)

    def _log_evicted(self) -> None:
        log.warning("connections.evicted", evicted=self._evicted, open=len(self), most=self.most)
        self._evicted = 0


def _address(accepted: socket.socket) -> str:
    try:
        return str(accepted.getpeername()[0])
    except (OSError, IndexError):  # it has disconnected, or has no name
        return ""


def _shut(accepted: socket.socket | None) -> None:
    if accepted is not None:
        with suppress(OSError):  # the client has disconnected
            accepted.shutdown(socket.SHUT_RDWR)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host`, a name or an address, and `port`, 0 for a free one. Raises OSError."""
    family, *_ = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def connection_limit(most: int, *, each: int, beside: int) -> int:
    """Return how many connections, `most` at most, this process has descriptors for; raises its limit if it can.

    Each connection takes `each` descriptors, and `beside` are for everything else.
    """
    needed = most * each + beside
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, (soft - beside) // each))


@asynccontextmanager
async def accepting(
    listener: socket.socket,
    connections: ConnectionTable[AnyConnection],
    make: Callable[[], AnyConnection],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Accept connections at `listener` during the block, each with a client made by `make`; then close it."""
    handshakes: set[asyncio.Task[None]] = set()
    task = asyncio.create_task(_accept(listener, connections, make, tls, handshakes))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        listener.close()
        connections.end_handshakes()
        if handshakes:
            await asyncio.wait(handshakes)


async def _accept(
    listener: socket.socket,
    connections: ConnectionTable[AnyConnection],
    make: Callable[[], AnyConnection],
    tls: ssl.SSLContext | None,
    handshakes: set[asyncio.Task[None]],
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, _ = await loop.sock_accept(listener)
        except ConnectionAbortedError:
            continue
        except OSError as error:
            log.warning(
                "connections.accept_failed", cause=error.strerror, open=len(connections), retry_in_s=ACCEPT_AGAIN_S
            )
            await asyncio.sleep(ACCEPT_AGAIN_S)
            continue
        client = make()
        connections.add(client, accepted)
        handshake = loop.create_task(_handshake(client, accepted, connections, tls))
        handshakes.add(handshake)
        handshake.add_done_callback(handshakes.discard)
        await asyncio.sleep(0)  # lets open connections run between accepts


async def _handshake(
    client: AnyConnection,
    accepted: socket.socket,
    connections: ConnectionTable[AnyConnection],
    tls: ssl.SSLContext | None,
) -> None:
    limit_s = HANDSHAKE_S if tls else None
    protocol = cast("asyncio.BaseProtocol", client)
    try:
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol, accepted, ssl=tls, ssl_handshake_timeout=limit_s, ssl_shutdown_timeout=limit_s
        )
    except OSError as error:  # no compatible TLS, a timeout, or evicted
        # asyncio's frame refers to the error: a cycle that would keep 300 KB until garbage collection
        error.__traceback__ = None
        connections.remove(client)
