"""What `edl monitor` shows, as Prometheus reads it.

Only who shows metrics imports this module, and with it Prometheus's client.
"""

from __future__ import annotations

import hmac
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, get_args
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edl_runtime.autoscale.history import JobState, ResourceUse
from edl_runtime.errors import SpecError
from edl_runtime.monitor.snapshot import UNITS, JobLine, MonitorSnapshot, PoolLine
from edl_runtime.protocol.address import check_exposure

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

HOST = "127.0.0.1"
"""Where it listens unless told otherwise: elsewhere it asks for a token."""

MOST_CONNECTIONS = 16
"""Each is one scrape, and has a thread before it is known whether its client has the token."""

ENDS_WITHIN_S = 0.05
"""After it is told to end."""


class MonitorCollector(Collector):
    """Shows what was last seen, in a registry of your own."""

    def __init__(self, last: Callable[[], MonitorSnapshot]) -> None:
        self._last = last

    def collect(self) -> Iterator[Metric]:
        """Return what was last seen."""
        seen = self._last()
        yield GaugeMetricFamily("edl_look_timestamp_seconds", "When it was looked, in Unix seconds.", seen.at)
        states = Counter(line.state for line in seen.jobs if line.kind == "trainer")
        yield _by(
            "edl_jobs",
            "Trainings that have not ended: with as many instances as they need, with fewer, and told to wait.",
            ["phase"],
            (([state], states[state]) for state in get_args(JobState)),
        )
        yield from _of_jobs(seen.jobs)
        yield from _of_resources(seen.use)
        yield from _of_pools(seen.pools)
        if seen.planned_at is not None:
            meaning = "When the sizes of jobs and pools were last decided, in Unix seconds."
            yield GaugeMetricFamily("edl_plan_timestamp_seconds", meaning, seen.planned_at)
        if seen.window:
            yield _by("edl_window", "1 for the traffic window that holds.", ["window"], [([seen.window], 1)])


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "PORT" or "HOST:PORT". Raises SpecError."""
    host, colon, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or (colon and not host):
        raise SpecError("--metrics", text, "PORT, or HOST:PORT, with a port of 1 to 65535, or 0 for a free one")
    return host.strip("[]") or HOST, int(port)


@contextmanager
def serving(last: Callable[[], MonitorSnapshot], host: str, port: int, token: str = "") -> Iterator[str]:
    """Show what was last seen at the URL that is given, by a thread of its own, to whoever has the bearer token.

    Raises SpecError where it can't, and off loopback without a token.
    """
    check_exposure(host, token, "EDL_MONITOR_TOKEN")
    registry = CollectorRegistry()
    registry.register(MonitorCollector(last))
    try:
        server = make_server(host, port, _guarded(make_wsgi_app(registry), token), _Server, _Handler)
    except OSError as error:
        given = f"{host}:{port}"
        raise SpecError("--metrics", given, f"an address that can be listened at ({error.strerror})") from error
    thread = threading.Thread(target=server.serve_forever, args=(ENDS_WITHIN_S,), name="edl metrics", daemon=True)
    thread.start()
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which there are few: beyond, the oldest is closed."""

    daemon_threads = True
    request_queue_size = 128  # of five, whose queue strangers fill, a client's next try comes seconds later

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # by arrival
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # its thread, which reads the end then, closes it
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)


class _Handler(WSGIRequestHandler):
    timeout = 10.0

    def log_message(self, *_: object) -> None:
        """A line for each scrape would be nobody's news."""


def _guarded(app: WSGIApplication, token: str) -> WSGIApplication:
    """Return the app for those alone who have the token; for all, if there is none."""
    wanted = f"Bearer {token}".encode()

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if token and not hmac.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), wanted):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"the bearer token is missing or wrong; it is in EDL_MONITOR_TOKEN\n"]
        return app(environ, start_response)

    return answer


def _of_jobs(lines: Iterable[JobLine]) -> Iterator[Metric]:
    """Return the sizes of jobs and pools; their label is "name", for "job" is Prometheus's own word."""
    named = [([line.name, line.kind], line) for line in lines]
    labels = ["name", "kind"]
    yield _by("edl_instances", "Instances that run.", labels, ((who, line.running) for who, line in named))
    meaning = "Instances asked for; 0 while a job is suspended."
    yield _by("edl_wanted_instances", meaning, labels, ((who, line.wanted) for who, line in named))
    meaning = "Instances that the last plan wants a job or pool to have."
    decided = ((who, line.target) for who, line in named if line.target is not None)
    yield _by("edl_target_instances", meaning, labels, decided)


def _of_resources(use: dict[str, ResourceUse]) -> Iterator[Metric]:
    named = [([resource, UNITS.get(resource, "pieces")], one) for resource, one in use.items()]
    labels = ["resource", "unit"]
    yield _by("edl_total", "What all nodes have.", labels, ((what, one.total) for what, one in named))
    meaning = "What is reserved on all nodes, by whomever."
    yield _by("edl_reserved", meaning, labels, ((what, one.reserved) for what, one in named))
    meaning = "What instances of jobs and pools that run reserve."
    yield _by("edl_reserved_by_jobs", meaning, labels, ((what, one.ours) for what, one in named))
    meaning = "What jobs and pools may use now, by the traffic windows and the highest load."
    allowed = ((what, one.allowed) for what, one in named if one.allowed is not None)
    yield _by("edl_training_capacity", meaning, labels, allowed)


def _of_pools(pools: Iterable[PoolLine]) -> Iterator[Metric]:
    lines = tuple(pools)
    for field, name, meaning in (
        ("teachers", "edl_pool_teachers", "Teachers registered in a pool."),
        ("students", "edl_pool_students", "Students registered in a pool."),
        ("busy", "edl_pool_busy_ratio", "Share of their time that a pool's teachers work."),
        ("waiting", "edl_pool_waiting_ratio", "Share of their time that a pool's students wait for teachers."),
    ):
        known = ((line.name, getattr(line, field)) for line in lines)
        yield _by(name, meaning, ["pool"], (([pool], value) for pool, value in known if value is not None))


def _by(name: str, meaning: str, labels: list[str], values: Iterable[tuple[list[str], float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, meaning, labels=labels)
    for each, value in values:
        family.add_metric(each, value)
    return family
