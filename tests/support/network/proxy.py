"""A proxy before a TCP server, for network faults."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator

PATIENCE_S = 100.0
"""Longest wait for the proxy's thread."""


class Proxy:
    """Forwards connections to a server until it is cut; see `running_proxy`."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._lost: list[socket.socket] = []
        self._is_cut = False
        self._dropped = threading.Event()
        self._must_lose = False
        self._closed = False

    def cut(self) -> None:
        """Close all connections and refuse new ones until `mend`. Returns when nothing is forwarded any more."""
        self._is_cut = True
        self._dropped.clear()
        for one in list(self._peers):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # the thread may wait until the caller reads what it sends
        self._wake.send(b"!")
        assert self._dropped.wait(PATIENCE_S), "the proxy's thread stands still"

    def mend(self) -> None:
        self._is_cut = False

    def lose(self) -> None:
        """Drop all data of present connections without closing them, as when a node is lost."""
        self._must_lose = True
        self._wake.send(b"!")

    def close(self) -> None:
        self._closed = True
        self._wake.send(b"!")

    def run(self) -> None:
        """Forward data until closed."""
        with selectors.DefaultSelector() as selector, self._listener, self._wake, self._woken:
            for ready in (self._listener, self._woken):
                selector.register(ready, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select():
                    self._serve(selector, key.fileobj)  # type: ignore[arg-type]
            self._drop_all(selector)
            for one in self._lost:
                one.close()

    def _serve(self, selector: selectors.BaseSelector, ready: socket.socket) -> None:
        if ready is self._woken:
            ready.recv(16)
            if self._is_cut:
                self._drop_all(selector)
                self._dropped.set()
            if self._must_lose:
                self._lose_all(selector)
        elif ready is self._listener:
            self._accept(selector)
        elif ready in self._peers:
            self._forward(selector, ready)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        near, _ = self._listener.accept()
        try:
            if self._is_cut:
                raise ConnectionRefusedError
            far = socket.create_connection(self._target, timeout=5)
            far.settimeout(None)
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self._peers[one] = other
            selector.register(one, selectors.EVENT_READ)

    def _forward(self, selector: selectors.BaseSelector, ready: socket.socket) -> None:
        try:
            data = ready.recv(1 << 16)
            self._peers[ready].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(selector, ready)

    def _drop(self, selector: selectors.BaseSelector, one: socket.socket) -> None:
        for each in (one, self._peers[one]):
            selector.unregister(each)
            del self._peers[each]
            each.close()

    def _drop_all(self, selector: selectors.BaseSelector) -> None:
        while self._peers:
            self._drop(selector, next(iter(self._peers)))

    def _lose_all(self, selector: selectors.BaseSelector) -> None:
        self._must_lose = False
        for one in self._peers:
            selector.unregister(one)
        self._lost += self._peers
        self._peers.clear()


@contextlib.contextmanager
def running_proxy(host: str, port: int) -> Iterator[Proxy]:
    """Yield a proxy in front of a server."""
    proxy = Proxy(host, port)
    thread = threading.Thread(target=proxy.run, name="proxy")
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join()
