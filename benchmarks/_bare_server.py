"""Receives and answers fixed numbers of bytes: the cost of sockets alone.

    python benchmarks/_bare_server.py REQUEST_BYTES ANSWER_BYTES

A thread for each connection. Prints its address and ends when its input is closed.
"""

from __future__ import annotations

import socket
import sys
import threading


def serve(connection: socket.socket, request_bytes: int, answer_bytes: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request, answer = bytearray(request_bytes), bytes(answer_bytes)
    while connection.recv_into(request, request_bytes, socket.MSG_WAITALL) == request_bytes:
        connection.sendmsg([answer])


def accept(server: socket.socket, request_bytes: int, answer_bytes: int) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=serve, args=(connection, request_bytes, answer_bytes), daemon=True).start()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        sizes = int(sys.argv[1]), int(sys.argv[2])
        threading.Thread(target=accept, args=(listening, *sizes), daemon=True).start()
        print(f"{host}:{port}", flush=True)
        sys.stdin.read()
