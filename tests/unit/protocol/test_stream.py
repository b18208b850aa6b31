"""The student's socket, against a peer that does as it is told."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from edl_runtime.protocol.stream import Stream


@contextlib.contextmanager
def connected(timeout_s: float) -> Iterator[tuple[Stream, socket.socket]]:
    """A stream, and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stream = Stream(socket.create_connection(listening.getsockname()), timeout_s)
        with contextlib.closing(stream), listening.accept()[0] as peer:
            yield stream, peer


def test_an_answer_that_trickles_in_is_given_up_in_time() -> None:
    """What counts is the time of the whole exchange, not that of each piece of it."""
    with connected(timeout_s=0.3) as (stream, peer):
        given_up = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not given_up.wait(0.01):
                    peer.sendall(b"X")

        trickling = threading.Thread(target=trickle)
        trickling.start()
        stream.begin()
        try:
            with pytest.raises(TimeoutError, match=r"longer than 0\.3 s"):
                stream.read_head()
        finally:
            given_up.set()
            trickling.join()


def test_a_peer_that_takes_nothing_is_given_up_in_time() -> None:
    """A request that the teacher never reads ends like an answer that never comes."""
    with connected(timeout_s=0.3) as (stream, _):
        size = 64 << 20
        stream.begin()
        with pytest.raises(TimeoutError, match=r"longer than 0\.3 s"):
            stream.send([bytes(size)], size)
