"""Whose connection goes when a server has too many."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from structlog.testing import capture_logs
from support.teachers.process import PATIENCE_S

from edl_runtime.protocol import listener as module
from edl_runtime.protocol.listener import ConnectionTable, accepting, connection_limit, listen


class Client(asyncio.Protocol):
    """A client that keeps what happens to it."""

    def __init__(self, *, idle: bool = True, stalled_for: int = 0) -> None:
        self.idle = idle
        self.stalled_for = stalled_for
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


Count = ConnectionTable[Client]


@pytest.fixture
def accepted() -> Iterator[socket.socket]:
    """A socket that a server has accepted, whose other end is kept open."""
    with ExitStack() as stack:
        ours, theirs = socket.socketpair()
        stack.enter_context(theirs)
        yield stack.enter_context(ours)


def arrived(connections: Count, accepted: socket.socket, *, known: bool = False, idle: bool = True) -> Client:
    client = Client(idle=idle)
    connections.add(client, accepted)
    connections.handshake_done(client)
    if known:
        connections.mark_used(client)
    return client


async def test_the_oldest_stranger_goes_first(accepted: socket.socket) -> None:
    """Before any client that is known, however long that has been idle."""
    connections = Count(2)
    known, stranger = arrived(connections, accepted, known=True), arrived(connections, accepted)
    newest = arrived(connections, accepted)
    assert [known.aborted, stranger.aborted, newest.aborted] == [False, True, False]
    assert list(connections) == [newest, known]


async def test_one_in_its_handshake_goes_by_its_socket() -> None:
    """It has no transport yet: its socket is shut, so that the handshake ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connections = Count(1)
        connections.add(Client(), ours)
        assert (len(connections), list(connections)) == (1, [])
        arrived(connections, theirs)
        assert theirs.recv(1) == b""
        assert len(connections) == 1


async def test_strangers_are_fewer_than_all(accepted: socket.socket) -> None:
    """They may take memory for nothing, so there is a limit of their own."""
    connections = Count(9, max_new=2)
    first, *others = [arrived(connections, accepted) for _ in range(3)]
    assert first.aborted
    assert not any(other.aborted for other in others)
    for other in others:
        connections.mark_used(other)
    arrived(connections, accepted)
    assert not any(other.aborted for other in others)


async def test_then_goes_who_has_been_idle_the_longest(accepted: socket.socket) -> None:
    """By the last request, not by arrival; one that waits for its answer is not idle."""
    connections = Count(3)
    busy = arrived(connections, accepted, known=True, idle=False)
    first, second = (arrived(connections, accepted, known=True) for _ in range(2))
    connections.mark_used(first)
    arrived(connections, accepted)
    assert [busy.aborted, first.aborted, second.aborted] == [False, False, True]


async def test_before_that_goes_who_has_stood_still_the_longest(accepted: socket.socket) -> None:
    """A stalled client is evicted before active ones; new clients are evicted first all the same."""
    connections = Count(4)
    known = [arrived(connections, accepted, known=True, idle=idle) for idle in (True, False, False)]
    stranger = arrived(connections, accepted)
    for client, looks in zip(known, (0, 3, 5), strict=True):
        client.stalled_for = looks
    gone = []
    for _ in range(4):
        newest = arrived(connections, accepted, known=True)
        gone.append([one for one in (stranger, *known) if one.aborted])
        assert not newest.aborted
    assert gone == [[stranger], [stranger, known[2]], [stranger, *known[1:]], [stranger, *known]]


async def test_where_all_are_busy_the_new_one_goes(accepted: socket.socket) -> None:
    """Nobody's answer is lost for a newcomer."""
    connections = Count(1)
    busy = arrived(connections, accepted, known=True, idle=False)
    newest = Client()
    connections.add(newest, accepted)
    connections.handshake_done(newest)
    assert list(connections) == [busy]
    assert not busy.aborted


async def test_where_all_are_busy_an_address_with_more_than_half_gives_way(
    monkeypatch: pytest.MonkeyPatch, accepted: socket.socket
) -> None:
    """One caller can't take all places from others: its latest request goes; for its own newcomers nothing does."""
    addresses = iter(["crowd", "other", "crowd", "crowd", "crowd", "third", "fourth"])
    monkeypatch.setattr(module, "_address", lambda _: next(addresses))
    connections = Count(4)
    first, other, second, third = (arrived(connections, accepted, known=True, idle=False) for _ in range(4))
    arrived(connections, accepted, known=True, idle=False)
    assert list(connections) == [first, other, second, third]
    newest = arrived(connections, accepted, known=True, idle=False)
    assert list(connections) == [first, other, second, newest]
    assert third.aborted
    arrived(connections, accepted, known=True, idle=False)
    assert list(connections) == [first, other, second, newest]


async def test_the_log_says_how_many_had_to_go(monkeypatch: pytest.MonkeyPatch, accepted: socket.socket) -> None:
    """One line for all of a while, however many they are, and another for those after it."""
    monkeypatch.setattr(module, "EVICTIONS_LOGGED_S", 0.01)
    connections = Count(1)
    arrived(connections, accepted)
    with capture_logs() as logs:
        for count in (1000, 2):
            for _ in range(count):
                arrived(connections, accepted)
            await asyncio.sleep(0.01)  # the loop's timers come in their order
    assert [(entry["event"], entry["evicted"], entry["open"], entry["most"]) for entry in logs] == [
        ("connections.evicted", 1000, 1, 1),
        ("connections.evicted", 2, 1, 1),
    ]


@pytest.mark.parametrize(("hard", "fits"), [(resource.RLIM_INFINITY, 500), (2000, 500), (700, 300), (10, 1)])
def test_connections_are_as_many_as_there_may_be_files(monkeypatch: pytest.MonkeyPatch, hard: int, fits: int) -> None:
    """The limit of files is raised as far as it can be; what is left has room for fewer connections."""
    limits = [(64, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    assert connection_limit(500, each=2, beside=100) == fits
    assert limits[-1][0] == (1100 if hard in (resource.RLIM_INFINITY, 2000) else hard)


async def test_without_descriptors_it_waits_and_says_so_once_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of asyncio itself would try a hundred times at once, with a traceback each."""
    loop, tries = asyncio.get_running_loop(), 0
    accept = loop.sock_accept

    async def sometimes(sock: socket.socket) -> tuple[socket.socket, object]:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", sometimes)
    monkeypatch.setattr(module, "ACCEPT_AGAIN_S", 0.01)
    made: asyncio.Future[Client] = loop.create_future()

    class Told(Client):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.set_result(self)
            transport.close()

    listener = listen("127.0.0.1", 0)
    with capture_logs() as logs:
        async with accepting(listener, ConnectionTable[Told](9), Told), asyncio.timeout(PATIENCE_S):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            await made
            writer.close()
    assert [entry["event"] for entry in logs] == ["connections.accept_failed"] * 2
