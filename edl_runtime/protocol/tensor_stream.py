"""A blocking socket that moves large arrays without copying them and keeps its timeouts in the kernel."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np

from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.http_heads import END_OF_HEAD, HEAD_LIMIT, ChunkedBody
from edl_runtime.protocol.tensors import Array

_BEGINNING = b"HTTP/1."
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_READ_AHEAD = 64 * 1024
_MOST_BUFFERS = min(os.sysconf("SC_IOV_MAX"), 1024)


class TensorStream:
    """One connected socket, for one thread at a time; `abort` may be called from another.

    Python's own socket timeouts would need a `poll` before each call and split large sends and reads; with the
    kernel's, a message of any size takes a call or two. Every method raises OSError, TimeoutError among them.

    `timeout_s` limits each call to the kernel, and no call starts later than that after `begin`: an exchange with a
    teacher that stops responding takes twice as long at most.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket = connected
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._buffer = bytearray(_READ_AHEAD)
        self._ahead = memoryview(self._buffer)
        self._start = self._end = 0  # of the bytes read ahead and not taken yet
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = int(timeout_s)
        limit = struct.pack("@ll", seconds, int((timeout_s - seconds) * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @property
    def is_local(self) -> bool:
        """Whether the other end seems to be on this machine."""
        return bool(self._socket.getsockname()[0] == self._socket.getpeername()[0])

    def begin(self) -> None:
        """Start the time limit of one exchange. Raises ProtocolError if unrequested bytes are left."""
        if self._start != self._end:
            raise ProtocolError("the teacher sent more than was requested")
        if len(self._buffer) != _READ_AHEAD:  # it was a body that came in chunks
            self._buffer = bytearray(_READ_AHEAD)
            self._ahead = memoryview(self._buffer)
        self._deadline = time.monotonic() + self._timeout_s

    def send(self, buffers: Sequence[bytes | Array], size: int) -> None:
        """Send all of them, `size` bytes together."""
        sent = self._sendmsg(buffers[:_MOST_BUFFERS])
        if sent < size:
            self._send_rest(buffers, sent)

    def _send_rest(self, buffers: Sequence[bytes | Array], sent: int) -> None:
        parts = deque([bytes_of(part) if isinstance(part, np.ndarray) else memoryview(part) for part in buffers])
        while True:
            while parts and sent >= len(parts[0]):
                sent -= len(parts.popleft())
            if not parts:
                return
            parts[0] = parts[0][sent:]
            self._check_deadline()
            sent = self._sendmsg(list(islice(parts, _MOST_BUFFERS)))

    def _sendmsg(self, buffers: Sequence[bytes | memoryview | Array]) -> int:
        try:
            return self._socket.sendmsg(buffers)  # type: ignore[arg-type]  # arrays are buffers
        except BlockingIOError:
            raise self._timed_out() from None

    def take(self, expected: bytes) -> bool:
        """Wait for bytes and take `expected` if they begin with all of it; otherwise take nothing."""
        if self._start == self._end:
            self._end += self._receive(self._ahead)
        if not self._buffer.startswith(expected, self._start, self._end):
            return False
        self._consume(len(expected))
        return True

    def read_head(self) -> bytes:
        """Read to the empty line. Raises ProtocolError if it does not come within the limit of a head.

        Anything that does not begin as HTTP is refused at its first bytes: an empty line may never come.
        """
        seen = 0  # nothing is left of the last exchange (`begin`), so the head is the first in the buffer
        while (end := self._buffer.find(END_OF_HEAD, seen, self._end)) < 0:
            if self._end >= HEAD_LIMIT:
                raise ProtocolError(f"the answer's head has more than {HEAD_LIMIT} bytes")
            first = bytes(self._ahead[: min(self._end, len(_BEGINNING))])
            if not _BEGINNING.startswith(first):
                raise ProtocolError(
                    f"not HTTP/1.1: the answer begins with {first!r}, allowed is {_BEGINNING.decode()!r}; "
                    "check the teacher's port, and EDL_TEACHER_CA if it speaks TLS"
                )
            if control := _CONTROL.search(self._buffer, seen, self._end):
                raise ProtocolError(f"not HTTP/1.1: the answer's head has the control byte {control[0]!r}")
            seen = max(0, self._end - len(END_OF_HEAD) + 1)
            self._end += self._receive(self._ahead[self._end :])
        head = bytes(self._ahead[: end + len(END_OF_HEAD)])
        self._consume(len(head))
        return head

    def join_chunks(self, head: bytes, limit: int) -> int:
        """Read the body that follows `head` in chunks, for the next reads to return; return its size.

        Raises ProtocolError for a body of more than `limit` bytes, and for what is no body in chunks.
        """
        body = ChunkedBody(head, limit)
        while not body.complete:
            if self._start == self._end:
                self._start, self._end = 0, self._receive(self._ahead)
            body.feed(self._ahead[self._start : self._end])
            self._start = self._end = 0
        self._buffer = body.content
        self._ahead, self._end = memoryview(self._buffer), len(self._buffer)
        return self._end

    def read(self, size: int) -> memoryview:
        """Read so many bytes; the result is valid until the next read."""
        if size <= self._end - self._start:
            part = self._ahead[self._start : self._start + size]
            self._consume(size)
            return part
        whole = memoryview(bytearray(size))
        self._fill(whole)
        return whole

    def fill(self, array: Array) -> None:
        self._fill(bytes_of(array))

    def _fill(self, into: memoryview) -> None:
        have = min(len(into), self._end - self._start)
        if have:
            into[:have] = self._ahead[self._start : self._start + have]
            self._consume(have)
        while have < len(into):
            have += self._receive(into[have:], socket.MSG_WAITALL)

    def _consume(self, size: int) -> None:
        self._start += size
        if self._start == self._end:
            self._start = self._end = 0

    def _receive(self, into: memoryview, flags: int = 0) -> int:
        self._check_deadline()
        try:
            received = self._socket.recv_into(into, 0, flags)
        except BlockingIOError:
            raise self._timed_out() from None
        if not received:
            raise ConnectionResetError("the teacher closed the connection")
        return received

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            raise self._timed_out()

    def _timed_out(self) -> TimeoutError:
        return TimeoutError(f"the teacher took longer than {self._timeout_s:g} s")

    def abort(self) -> None:
        """Make a call in another thread raise OSError; the descriptor stays open until `close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array, without copying them."""
    return array.reshape(-1).view(np.uint8).data
