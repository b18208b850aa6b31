"""The student's connection to one teacher, made anew whenever it can't be used any more."""

from __future__ import annotations

import socket
import threading
from types import TracebackType

from edl_runtime.errors import InferenceError
from edl_runtime.protocol.stream import Stream
from edl_runtime.protocol.tls import Trust, open_tls

_CONNECT_TIMEOUT_S = 5.0


class Link:
    """Lends a connected stream for one request and its answer: `with link as stream`. Connects when it must.

    For one thread at a time; only `close` may come from another. After any error but InferenceError the stream is
    let go of, for nobody knows where in an answer it stands; so it is when `keep` was set to False meanwhile.

    - `timeout_s`: limit of each exchange (see `Stream`), and of connecting (which gets 5 s at most).
    - `trust`: what is asked of the teacher's certificate; None for a connection without TLS.
    """

    def __init__(self, endpoint: tuple[str, int], timeout_s: float, trust: Trust | None = None) -> None:
        self.keep = False
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._trust = trust
        self._stream: Stream | None = None
        self._in_use = threading.Lock()
        self._closed = False

    def __enter__(self) -> Stream:
        """Raise OSError when there is no connection to be had, ProtocolError when something was left in it."""
        self._in_use.acquire()
        self.keep = False
        try:
            stream = self._connected()
            stream.begin()
        except BaseException:
            self._end()
            raise
        self.keep = True
        return stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, InferenceError):
            self.keep = False
        self._end()

    def close(self) -> None:
        """Disconnect for good. An exchange under way in another thread raises OSError at once."""
        self._closed = True
        stream = self._stream
        if stream is not None:
            stream.abort()
        if self._in_use.acquire(blocking=False):  # else the thread that uses it closes it
            self._disconnect()
            self._in_use.release()

    def _end(self) -> None:
        if not self.keep:
            self._disconnect()
        self._in_use.release()
        if self._closed:  # by another thread, which could not disconnect while the exchange lasted
            self._disconnect()

    def _connected(self) -> Stream:
        if self._stream is None and not self._closed:
            connected = socket.create_connection(self._endpoint, min(self._timeout_s, _CONNECT_TIMEOUT_S))
            if self._trust is None:
                self._stream = Stream(connected, self._timeout_s)
            else:
                self._stream = open_tls(connected, self._trust, self._endpoint[0], self._timeout_s)
        if self._stream is None or self._closed:
            raise ConnectionAbortedError(
                f"the connection to teacher {self._endpoint[0]}:{self._endpoint[1]} was closed"
            )
        return self._stream

    def _disconnect(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
