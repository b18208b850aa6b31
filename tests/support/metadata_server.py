"""A metadata server that answers as those of three clouds are documented to; see `edl_runtime.preemption`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

TOKEN = "session"
NAME = "worker_3"
"""The machine's, in its scale set."""

Answer = tuple[int, str, Mapping[str, str]]


class MetadataServer:
    """What it was asked, as "METHOD PATH".

    It answers while `answers` is set: everything with `status` while that is not 0, and with `text` while that is not
    None, except for the machine's name.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[str] = []
        self.status = 0
        self.text: str | None = None
        self.answers = threading.Event()
        self.answers.set()
        self._ends_at: datetime | None = None
        self._machine = ""
        self._changed = threading.Condition()

    def announce(self, left_s: float, *, machine: str = NAME) -> None:
        """Announce that the machine is taken away in so many seconds; on Azure, that this one of the scale set is."""
        with self._changed:
            self._ends_at, self._machine = datetime.now(UTC) + timedelta(seconds=left_s), machine
            self._changed.notify_all()

    def await_questions(self, count: int, limit_s: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.asked) >= count, limit_s)

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        with self._changed:
            self.asked.append(f"{method} {parts.path}")
            self._changed.notify_all()
        self.answers.wait()
        if self.status:
            return self.status, "", {}
        if self.text is not None and not parts.path.endswith("/name"):
            return 200, self.text, {}
        if parts.path.startswith("/computeMetadata/v1/"):
            return self._gcp(parts.path, query, headers)
        return (
            self._azure(parts.path, query, headers)
            if parts.path.startswith("/metadata/")
            else self._aws(method, parts.path, headers)
        )

    def _aws(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if (method, path) == ("PUT", "/latest/api/token"):
            return (200, TOKEN, {}) if "X-aws-ec2-metadata-token-ttl-seconds" in headers else (400, "", {})
        if headers.get("X-aws-ec2-metadata-token") != TOKEN:
            return 401, "", {}
        if path != "/latest/meta-data/spot/instance-action" or not self._ends_at:
            return 404, "", {}
        return 200, json.dumps({"action": "terminate", "time": f"{self._ends_at:%Y-%m-%dT%H:%M:%SZ}"}), {}

    def _gcp(self, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Answer:
        if headers.get("Metadata-Flavor") != "Google":
            return 403, "", {}
        if path != "/computeMetadata/v1/instance/preempted":
            return 404, "", {}
        with self._changed:
            if query.get("wait_for_change") == "true":
                until = time.monotonic() + float(query["timeout_sec"])
                self._changed.wait_for(
                    lambda: self.status or self._etag != query["last_etag"], until - time.monotonic()
                )
            return 200, "TRUE" if self._ends_at else "FALSE", {"ETag": self._etag}

    @property
    def _etag(self) -> str:
        return "b2" if self._ends_at else "a1"

    def _azure(self, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Answer:
        if headers.get("Metadata") != "true" or "api-version" not in query:
            return 400, "", {}
        if path == "/metadata/instance/compute/name":
            return 200, NAME, {}
        if path != "/metadata/scheduledevents":
            return 404, "", {}
        common = {
            "EventId": "1",
            "ResourceType": "VirtualMachine",
            "EventStatus": "Scheduled",
            "EventSource": "Platform",
        }
        events = [{**common, "EventType": "Freeze", "Resources": [NAME], "NotBefore": ""}]
        if self._ends_at:
            at = format_datetime(self._ends_at, usegmt=True)
            events.append({**common, "EventType": "Preempt", "Resources": [self._machine], "NotBefore": at})
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": events}), {}

    def close(self) -> None:
        """Answer who waits for a change."""
        with self._changed:
            self.status = 503
            self.answers.set()
            self._changed.notify_all()


@contextmanager
def metadata_server() -> Iterator[MetadataServer]:
    """Run a server on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text, headers = state.answer(self.command, self.path, self.headers)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(text)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode(errors="surrogateescape"))

        do_PUT = do_GET  # noqa: N815 - the name that the library looks up

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state = MetadataServer(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield state
        finally:
            state.close()
            server.shutdown()
