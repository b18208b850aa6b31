"""What the client makes of an API server's errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from edl_airflow.laptop.client import AirflowClient, ApiError

Answer = tuple[int, dict[str, object]]

LOCKED: Answer = (500, {"detail": {"reason": "Database error", "message": "Serious error when handling your request."}})
BROKEN: Answer = (500, {"detail": "Internal Server Error"})
GOOD: Answer = (200, {"is_paused": True})


class _Server(HTTPServer):
    """Gives the answers it is told, in turn."""

    answers: list[Answer]


class _Connection(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        status, body = self.server.answers.pop(0)
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Connection) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def client(server: _Server) -> Iterator[AirflowClient]:
    with AirflowClient(f"http://127.0.0.1:{server.server_port}", "admin", "secret") as client:
        yield client


def test_a_locked_database_is_asked_again(server: _Server, client: AirflowClient) -> None:
    """Airflow on SQLite refuses what comes while it waits for itself; a moment later it takes it."""
    server.answers = [LOCKED, LOCKED, GOOD]
    assert client.dag("some") == {"is_paused": True}


def test_another_error_of_the_server_is_told_at_once(server: _Server, client: AirflowClient) -> None:
    """What only looks alike isn't tried again."""
    server.answers = [BROKEN, GOOD]
    with pytest.raises(ApiError, match="with 500"):
        client.dag("some")
    assert server.answers == [GOOD]
