"""A teacher for the original's stand-in client: ignores the request's content, and answers zeros at once.

A request is its rows (32 bits), its size (64 bits) and its bytes; the answer is rows times LOGITS float32.
A thread for each connection. Prints its address and ends when its input is closed.
"""

from __future__ import annotations

import contextlib
import socket
import struct

from _bare_server import run
from _data import LOGITS

HEADER = struct.Struct("!IQ")


def serve(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(64 * 1024 * 1024))
    with contextlib.suppress(OSError):
        while len(header := connection.recv(HEADER.size, socket.MSG_WAITALL)) == HEADER.size:
            rows, size = HEADER.unpack(header)
            connection.recv_into(buffer, size, socket.MSG_WAITALL)
            connection.sendall(bytes(4 * LOGITS * rows))
    connection.close()


if __name__ == "__main__":
    run(serve)
