"""Receives and answers fixed numbers of bytes: the cost of sockets alone.

    python benchmarks/_bare_server.py REQUEST_BYTES ANSWER_BYTES

A thread for each connection. Prints its address and ends when its input is closed.
"""

from __future__ import annotations

import functools
import socket
import sys
import threading
from collections.abc import Callable


def serve(connection: socket.socket, request_bytes: int, answer_bytes: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request, answer = bytearray(request_bytes), bytes(answer_bytes)
    while connection.recv_into(request, request_bytes, socket.MSG_WAITALL) == request_bytes:
        connection.sendmsg([answer])


def run(serve: Callable[[socket.socket], None]) -> None:
    """Serve each connection in a thread; print the address and return when standard input is closed."""

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        host, port = server.getsockname()
        print(f"{host}:{port}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    run(functools.partial(serve, request_bytes=int(sys.argv[1]), answer_bytes=int(sys.argv[2])))
