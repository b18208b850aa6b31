"""Messages over a socket between two processes of one machine: each its length in four bytes, then JSON."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from edl_runtime.decoding import Decoder

LONGEST = 1 << 20
"""Bytes of a message, at most: environment variables are the most there is to say."""

_HEAD = struct.Struct("!I")

Said = TypeVar("Said")
"""The kinds of messages that arrive."""


def pack(message: msgspec.Struct) -> bytes:
    """Return the message as it travels. Raises ValueError above `LONGEST`."""
    body = msgspec.json.encode(message)
    if len(body) > LONGEST:
        raise ValueError(f"a message of {len(body)} bytes, allowed are {LONGEST}")
    return _HEAD.pack(len(body)) + body


class Unpacker(Generic[Said]):
    """Cuts what arrives into messages of the union `kinds`."""

    def __init__(self, kinds: object) -> None:
        self._decoder: Decoder[Said] = Decoder(kinds)
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Said]:
        """Yield the messages that `data` completes. Raises msgspec.DecodeError for anything else, and nothing else."""
        self._pending += data
        while len(self._pending) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._pending)
            if size > LONGEST:
                raise msgspec.DecodeError(f"a message of {size} bytes, allowed are {LONGEST}")
            end = _HEAD.size + size
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_HEAD.size : end])
            del self._pending[:end]
            yield self._decoder.decode(body)


class Channel(Generic[Said]):
    """A trainer's end: any thread may say something, one thread listens."""

    def __init__(self, end: socket.socket, kinds: object) -> None:
        self._end = end
        self._unpacker: Unpacker[Said] = Unpacker(kinds)
        self._saying = threading.Lock()

    def say(self, message: msgspec.Struct) -> None:
        """Send a message. Raises OSError when the other end is gone."""
        with self._saying:
            self._end.sendall(pack(message))

    def listen(self) -> Iterator[Said]:
        """Yield what the other end says, until it is gone."""
        while data := self._end.recv(1 << 16):
            yield from self._unpacker.feed(data)

    def close(self) -> None:
        self._end.close()
