"""How the ranks of a generation connect, and what they sum over the control channel."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from support.network.ports import free_ports

from edl_runtime.elastic.comm import bootstrap
from edl_runtime.elastic.comm.agent_protocol import Heartbeat, JoinGeneration, encode_message
from edl_runtime.elastic.comm.bootstrap import Bootstrap, ControlChannel, Hello, Welcome
from edl_runtime.elastic.comm.ring import Ring
from edl_runtime.elastic.errors import GroupLostError


def joined(generation: int, *, rank: int = 0, size: int = 1, store: str = "") -> JoinGeneration:
    return JoinGeneration(generation=generation, rank=rank, world_size=size, store=store, instances=4, token="secret")


NO_UTF8 = encode_message(Hello(generation=1, rank=1, name="stranger", step=None, token="")).replace(
    b"stranger", b"\xff" * 8
)
"""What a rank says, with a name that is no text."""


def free_store() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def connect_to(store: str) -> socket.socket:
    """Return a connection to the store, as soon as rank 0 listens there."""
    host, _, port = store.rpartition(":")
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((host, int(port)), 60)
        except OSError:
            assert time.monotonic() < deadline


def test_ranks_connect_in_any_order_beside_strangers() -> None:
    """Strangers and ranks of other generations are refused; the steps are those of all ranks."""
    store = free_store()
    with ThreadPoolExecutor(4) as pool:
        ranks = [Bootstrap(joined(7, rank=rank, size=3, store=store)) for rank in range(3)]
        early = pool.submit(ranks[2].run, "c", None, lambda: 0)
        older = Bootstrap(joined(6, rank=1, size=3, store=store))
        lost = pool.submit(older.run, "x", 3, lambda: 0)
        host = pool.submit(ranks[0].run, "a", 5, lambda: 4321)
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", encode_message(Heartbeat()), NO_UTF8):
            with connect_to(store) as stranger:
                stranger.sendall(noise)
        late = pool.submit(ranks[1].run, "b", 4, lambda: 0)
        for met, _ in (early.result(), host.result(), late.result()):
            assert (met.names, met.steps, met.store_port) == (["a", "b", "c"], [5, 4, None], 4321)
        older.abort()
        with pytest.raises(GroupLostError, match="generation 6"):
            lost.result()
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("silent", [False, True], ids=["nobody", "one that says nothing"])
@pytest.mark.parametrize("rank", [0, 1])
def test_bootstrap_ends_when_it_is_aborted(rank: int, *, silent: bool) -> None:
    """It has no time limit of its own; agents decide."""
    store = free_store()
    host, _, port = store.rpartition(":")
    meeting = Bootstrap(joined(1, rank=rank, size=3, store=store))
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        if silent and rank:
            stack.enter_context(socket.create_server((host, int(port))))
        waiting = pool.submit(meeting.run, "a", None, lambda: 0)
        if silent and not rank:
            guest = stack.enter_context(connect_to(store))
            guest.sendall(encode_message(here(1, "b", "secret")))
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        meeting.abort()
        with pytest.raises(GroupLostError):
            waiting.result(60)


def here(rank: int, name: str, token: str) -> Hello:
    return Hello(generation=1, rank=rank, name=name, step=99, token=token)


def test_a_rank_has_the_token_and_the_first_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stranger takes the place of a rank: the state of all may be taken from it."""
    monkeypatch.setattr("edl_runtime.elastic.comm.bootstrap.HELLO_LIMIT_S", 60.0)
    store = free_store()
    host = Bootstrap(joined(1, rank=0, size=3, store=store))
    with ThreadPoolExecutor(1) as pool, end_of_each(store, 4) as open_ends:
        met = pool.submit(host.run, "a", None, lambda: 1)
        stranger, first, second, last = (next(open_ends) for _ in range(4))
        stranger.sendall(encode_message(here(1, "stranger", "guess")))
        assert stranger.recv(1) == b""
        first.sendall(encode_message(here(1, "b", "secret")))
        second.sendall(encode_message(here(1, "again", "secret")))
        assert second.recv(1) == b""
        last.sendall(encode_message(here(2, "c", "secret")))
        assert met.result(60)[0].names == ["a", "b", "c"]
    host.close()


@contextmanager
def end_of_each(store: str, count: int) -> Iterator[Iterator[socket.socket]]:
    """Yield so many connections, each made when it is asked for."""
    ends: list[socket.socket] = []

    def connect() -> Iterator[socket.socket]:
        for _ in range(count):
            ends.append(connect_to(store))
            yield ends[-1]

    yield connect()
    for end in ends:
        end.close()


def test_a_rank_whose_hello_is_late_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """To rank 0 and to the one after it: both have closed its connection by then."""
    monkeypatch.setattr(bootstrap, "HELLO_LIMIT_S", 0.05)
    connect, late = Bootstrap._connect, set()

    def connect_late(meeting: Bootstrap, address: tuple[str, int]) -> socket.socket:
        if address in late:
            return connect(meeting, address)
        try:
            end = meeting._register(socket.create_connection(address))
        except ConnectionRefusedError:  # rank 0 does not listen yet
            return connect(meeting, address)
        late.add(address)
        return end

    monkeypatch.setattr(Bootstrap, "_connect", connect_late)
    store = free_store()
    meetings = [Bootstrap(joined(1, rank=rank, size=3, store=store)) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        welcomes = list(pool.map(lambda meeting: meeting.run("a", None, lambda: 0)[0], meetings))
        rings = pool.map(lambda meeting, welcome: meeting.connect_ring(welcome), meetings, welcomes)
        assert list(pool.map(sent_around, rings, range(3))) == [2, 0, 1]
    assert len(late) >= 3, "that of each rank of the ring"
    for meeting in meetings:
        meeting.close()


def sent_around(ring: Ring, rank: int) -> int:
    """Send the rank's number, and return that of the rank before it."""
    ring.send(np.full(5, rank, np.uint8))
    received = np.empty(5, np.uint8)
    ring.receive(received)
    return int(received.max())


def test_a_stranger_gets_no_place_in_the_ring() -> None:
    """Nor does a rank at another's; what a rank sends at once after its Hello is not lost."""
    store = free_store()
    meetings = [Bootstrap(joined(1, rank=rank, size=3, store=store)) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        welcomes = list(pool.map(lambda meeting: meeting.run("a", None, lambda: 0)[0], meetings))
        for rank, endpoint in enumerate(welcomes[0].endpoints):
            for hello in (here((rank - 1) % 3, "stranger", "guess"), here(rank, "another", "secret")):
                stranger = stack.enter_context(socket.create_connection(endpoint))
                stranger.sendall(encode_message(hello) + b"what a stranger says")

        rings = pool.map(lambda meeting, welcome: meeting.connect_ring(welcome), meetings, welcomes)
        assert list(pool.map(sent_around, rings, range(3))) == [2, 0, 1]
    for meeting in meetings:
        meeting.close()


@pytest.mark.slow
def test_a_slow_stranger_does_not_delay_the_ranks() -> None:
    """Each connection has a second for its whole Hello."""
    store = free_store()
    late = Bootstrap(joined(1, rank=1, size=2, store=store))
    done = threading.Event()

    def drip(end: socket.socket) -> None:
        try:
            end.sendall(b"\0\x01\0\0")
            while not done.wait(0.1):
                end.sendall(b" ")
        except OSError:
            pass

    host = Bootstrap(joined(1, rank=0, size=2, store=store))
    with ThreadPoolExecutor(3) as pool, end_of_each(store, 1) as open_ends:
        met = pool.submit(host.run, "a", None, lambda: 1)
        dripping = pool.submit(drip, next(open_ends))
        pool.submit(late.run, "b", None, lambda: 0)  # again and again, if a busy machine makes it too slow to be heard
        assert met.result(60)[0].names == ["a", "b"]
        done.set()
        dripping.result(60)
    host.close()
    late.close()


def test_silent_strangers_do_not_delay_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are read at once: a rank behind them connects before their time is over. Their number is limited."""
    monkeypatch.setattr("edl_runtime.elastic.comm.bootstrap.HELLO_LIMIT_S", 3600.0)
    monkeypatch.setattr("edl_runtime.elastic.comm.bootstrap.EXTRA_PENDING", 1)
    store = free_store()
    ranks = [Bootstrap(joined(1, rank=rank, size=2, store=store)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool, end_of_each(store, 8) as open_ends:
        met = pool.submit(ranks[0].run, "a", None, lambda: 1)
        strangers = list(open_ends)
        assert strangers[0].recv(1) == b""
        pool.submit(ranks[1].run, "b", None, lambda: 0)
        assert met.result(60)[0].names == ["a", "b"]
    for rank in ranks:
        rank.close()


def test_nothing_is_kept_of_strangers_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many connect while ranks are waited for."""
    monkeypatch.setattr("edl_runtime.elastic.comm.bootstrap.HELLO_LIMIT_S", 60.0)
    store = free_store()
    ranks = [Bootstrap(joined(1, rank=rank, size=2, store=store)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        met = pool.submit(ranks[0].run, "a", None, lambda: 1)
        before = closed_sockets()
        for _ in range(15):
            with connect_to(store) as stranger:
                stranger.sendall(NO_UTF8)
                assert stranger.recv(1) == b""
        kept = closed_sockets() - before
        pool.submit(ranks[1].run, "b", None, lambda: 0)
        assert met.result(60)[0].names == ["a", "b"]
    assert kept < 5
    for rank in ranks:
        rank.close()


def closed_sockets() -> int:
    """Return how many sockets of this process are closed, but still referenced."""
    gc.collect()
    return sum(isinstance(each, socket.socket) and each.fileno() < 0 for each in gc.get_objects())


@contextmanager
def channels(count: int) -> Iterator[tuple[list[Bootstrap], list[ControlChannel]]]:
    """Connect so many ranks."""
    store = free_store()
    meetings = [Bootstrap(joined(1, rank=rank, size=count, store=store)) for rank in range(count)]
    with ThreadPoolExecutor(count) as pool:
        holding: list[Future[tuple[Welcome, ControlChannel]]] = [
            pool.submit(meeting.run, str(rank), None, lambda: 0) for rank, meeting in enumerate(meetings)
        ]
        found = [each.result()[1] for each in holding]
    yield meetings, found
    for meeting in meetings:
        meeting.close()


def test_all_ranks_have_the_same_sums() -> None:
    """Of any length, one after the other, and of the largest numbers."""
    with channels(3) as (_, ranks), ThreadPoolExecutor(3) as pool:
        for own in (np.array([1 << 40, -2]), np.arange(50_000, dtype=np.int64)):
            for summed in pool.map(lambda star, own=own: star.all_reduce(own), ranks):
                assert summed.tolist() == (3 * own).tolist()


@pytest.mark.parametrize(
    "end", [lambda meetings: meetings[2].close(), lambda meetings: meetings[0].abort()], ids=["a rank goes", "abort"]
)
def test_no_rank_waits_for_one_that_is_gone(end: Callable[[list[Bootstrap]], None]) -> None:
    """Rank 0 notices it though another one has not sent yet; the others notice that rank 0 closes."""
    with channels(3) as (meetings, ranks), ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(ranks[0].all_reduce, np.zeros(2, np.int64))
        end(meetings)
        with pytest.raises((EOFError, OSError)):
            waiting.result(60)
        meetings[0].close()
        with pytest.raises((EOFError, OSError)):
            pool.submit(ranks[1].all_reduce, np.zeros(2, np.int64)).result(60)
