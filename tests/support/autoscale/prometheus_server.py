"""An HTTP server that answers `/api/v1/query_range` as Prometheus does, with its limits and error messages.

A query is the name of a series of the test, or sum(NAME). Other PromQL is not supported.
"""

from __future__ import annotations

import json
import math
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from support.network.certificates import CertificateFiles

POINTS = 11_000
PIECE = 1 << 16

Values = Callable[[float], float | None]
"""The value of a series at a time, None for no sample."""


class FakePrometheus:
    """The served series, the received `queries`, and the number of bytes `sent`.

    `answer` replaces Prometheus' own; `trickle_s` is the delay between two bytes, and a range longer than `longest_s`
    is refused.
    """

    def __init__(self) -> None:
        self.url = ""
        self.series: dict[str, list[tuple[Mapping[str, str], Values]]] = {}
        self.token = ""
        self.answer: tuple[int, bytes, Mapping[str, str]] | None = None
        self.delay_s = 0.0
        self.trickle_s = 0.0
        self.longest_s = math.inf
        self.queries: list[dict[str, str]] = []
        self.sent = 0
        self.closing = threading.Event()

    def respond(self, path: str, headers: Mapping[str, str]) -> tuple[int, bytes, Mapping[str, str]]:
        """Return status, body and headers of an answer."""
        parts = urlsplit(path)
        self.queries.append({name: values[0] for name, values in parse_qs(parts.query).items()})
        if self.delay_s:
            self.closing.wait(self.delay_s)
        if self.answer is not None:
            return self.answer
        if self.token and headers.get("Authorization") != f"Bearer {self.token}":
            return 401, b"Unauthorized\n", {}
        if parts.path != "/api/v1/query_range":
            return 404, b"404 page not found\n", {}
        return self._query(self.queries[-1])

    def _query(self, asked: Mapping[str, str]) -> tuple[int, bytes, Mapping[str, str]]:
        start, end, step = (float(asked[name]) for name in ("start", "end", "step"))
        if end < start:
            return _bad_data('invalid parameter "end": end timestamp must not be before start time')
        if (end - start) / step > POINTS:
            return _bad_data(
                "exceeded maximum resolution of 11,000 points per timeseries. "
                "Try decreasing the query resolution (?step=XX)"
            )
        if asked["query"].count("(") != asked["query"].count(")"):
            return _bad_data(
                f'invalid parameter "query": 1:{len(asked["query"]) + 1}: parse error: unclosed left parenthesis'
            )
        if end - start > self.longest_s:
            return _error(
                422, "execution", "query processing would load too many samples into memory in query execution"
            )
        name = re.sub(r"^sum\((.*)\)$", r"\1", asked["query"])
        result = []
        for labels, values in self.series.get(asked["query"], self.series.get(name, [])):
            times = [start + number * step for number in range(int((end - start) / step + 1e-9) + 1)]
            points = [(at, found) for at in times if (found := values(at)) is not None]
            if points:
                result.append({"metric": labels, "values": [[at, _text(found)] for at, found in points]})
        return 200, json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode(), {}


@contextmanager
def prometheus(tls: CertificateFiles | None = None) -> Iterator[FakePrometheus]:
    """Run a server on a free port, with TLS if it has a certificate."""
    server_state = FakePrometheus()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, headers = server_state.respond(self.path, dict(self.headers))
            with suppress(ConnectionError):  # the client has disconnected
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                piece = 1 if server_state.trickle_s else PIECE
                for start in range(0, len(body), piece):
                    self.wfile.write(body[start : start + piece])
                    server_state.sent += piece
                    server_state.closing.wait(server_state.trickle_s)

        def log_message(self, *_args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server_state.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server_state
    finally:
        server_state.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _bad_data(error: str) -> tuple[int, bytes, Mapping[str, str]]:
    return _error(400, "bad_data", error)


def _error(status: int, kind: str, error: str) -> tuple[int, bytes, Mapping[str, str]]:
    return status, json.dumps({"status": "error", "errorType": kind, "error": error}).encode(), {}


def _text(value: float) -> str:
    return {"inf": "+Inf", "nan": "NaN"}.get(str(value), str(value))
