"""The student's socket, against a peer that does as it is told."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from edl_runtime.protocol import stream as streams
from edl_runtime.protocol.stream import Stream


@contextlib.contextmanager
def connected(timeout_s: float) -> Iterator[tuple[Stream, socket.socket]]:
    """A stream, and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stream = Stream(socket.create_connection(listening.getsockname()), timeout_s)
        with contextlib.closing(stream), listening.accept()[0] as peer:
            yield stream, peer


@contextlib.contextmanager
def trickling(move: Callable[[], object]) -> Iterator[None]:
    """Have the peer move a little again and again."""
    given_up = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not given_up.wait(0.01):
                move()

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        yield
    finally:
        given_up.set()
        thread.join()


def test_an_answer_that_trickles_in_is_given_up_in_time() -> None:
    """What counts is the time of the whole exchange, not that of each piece of it."""
    with connected(timeout_s=0.3) as (stream, peer), trickling(lambda: peer.sendall(b"X")):
        stream.begin()
        with pytest.raises(TimeoutError, match=r"longer than 0\.3 s"):
            stream.read_head()


@pytest.mark.parametrize("taken", [0, 1 << 18])
def test_a_request_that_is_not_taken_is_given_up_in_time(taken: int) -> None:
    """The teacher reads nothing of it, or a little now and then."""
    with connected(timeout_s=0.3) as (stream, peer), trickling(lambda: taken and peer.recv(taken)):
        size = 64 << 20
        stream.begin()
        with pytest.raises(TimeoutError, match=r"longer than 0\.3 s"):
            stream.send([bytes(size)], size)


def test_each_exchange_has_the_time_limit_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a connection has been idle."""
    now_s = time.monotonic()
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: now_s))
    with connected(timeout_s=60) as (stream, peer):
        now_s += 3600
        stream.begin()
        peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        assert stream.read_head().startswith(b"HTTP/1.1 200")
