"""A teacher with faults on command: a small Open Inference Protocol server, run as a program.

    faulty_teacher.py METADATA

Answers as `support.models:slow` does: twice its input `x`, after the seconds in the first number. It prints its
address, and then a line for each line it reads: a behaviour of `BEHAVIOURS`, or "slower N" for N times the seconds.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

METADATA = "/v2/models/teacher"


class Teacher(ThreadingHTTPServer):
    """What all connections share.

    `requests`: the client's port, first batch and row of each request since the last change of behaviour.
    """

    daemon_threads = True

    def __init__(self, metadata: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.metadata = metadata
        self.behaviour = "good"
        self.slower = 1.0
        self.requests: list[tuple[int, int, int]] = []

    def set_behaviour(self, command: str) -> None:
        slower = command.removeprefix("slower ")
        self.slower = 1.0 if slower == command else float(slower)
        self.behaviour = command if slower == command else "good"
        self.requests.clear()
        if self.behaviour not in BEHAVIOURS:
            raise ValueError(command)

    def handle_error(self, *_: Any) -> None:
        """Print nothing about clients that have disconnected."""


class Connection(BaseHTTPRequestHandler):
    """One client's requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Teacher

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        if self.server.behaviour == "mute":
            threading.Event().wait()
        elif self.path == METADATA:
            self.send(200, self.server.metadata)
        elif self.path == "/requests":
            self.send(200, json.dumps(self.server.requests).encode())
        else:
            self.send(200, b'{"ready": true}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        x = np.frombuffer(body[int(self.headers["Inference-Header-Content-Length"]) :], np.float32).reshape(-1, 4)
        self.server.requests.append((self.client_address[1], int(x[0, 1]), int(x[0, 2])))
        time.sleep(float(x[0, 0]) * self.server.slower)
        BEHAVIOURS[self.server.behaviour](self, x)

    def answer(self, array: np.ndarray[Any, Any], datatype: str = "FP32") -> None:
        self.send(200, _json_of(array, datatype))

    def send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def send_half(self, x: np.ndarray[Any, Any]) -> None:
        content = _json_of(x * 2, "FP32")
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])

    def send_garbage(self) -> None:
        self.wfile.write(bytes(range(256)) + b"\r\n\r\n")
        self.close_connection = True

    def close_after_half(self, x: np.ndarray[Any, Any]) -> None:
        self.send_half(x)
        self.close_connection = True

    def hang_after_half(self, x: np.ndarray[Any, Any]) -> None:
        self.send_half(x)
        threading.Event().wait()


def _json_of(array: np.ndarray[Any, Any], datatype: str) -> bytes:
    output = {"name": "double", "datatype": datatype, "shape": array.shape, "data": array.ravel().tolist()}
    return json.dumps({"model_name": "teacher", "outputs": [output]}).encode()


BEHAVIOURS: dict[str, Callable[[Connection, np.ndarray[Any, Any]], Any]] = {
    "good": lambda self, x: self.answer(x * 2),
    "garbage": lambda self, _: self.send_garbage(),
    "no JSON": lambda self, _: self.send(200, b"{what?"),
    "wrong shape": lambda self, x: self.answer(x[:, :3]),
    "a row less": lambda self, x: self.answer(x[1:]),
    "wrong dtype": lambda self, x: self.answer(x.astype(np.float64), "FP64"),
    "wrong output": lambda self, _: self.send(200, b'{"model_name": "teacher", "outputs": []}'),
    "error": lambda self, _: self.send(500, b'{"error": "it broke"}'),
    "half, then closed": Connection.close_after_half,
    "half, then silent": Connection.hang_after_half,
    "silent": lambda *_: threading.Event().wait(),
    "mute": lambda *_: threading.Event().wait(),
}
"""Responses to requests. A mute teacher answers health checks and metadata no more, either."""


def main(metadata: str) -> None:
    teacher = Teacher(metadata.encode())
    threading.Thread(target=teacher.serve_forever, daemon=True).start()
    print("127.0.0.1", teacher.server_port, sep=":", flush=True)  # noqa: T201 - read by the test
    for line in sys.stdin:
        teacher.set_behaviour(line.strip())
        print("done", flush=True)  # noqa: T201 - as above


if __name__ == "__main__":
    main(*sys.argv[1:])
