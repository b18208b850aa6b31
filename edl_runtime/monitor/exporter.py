"""Prometheus exporter of `edl monitor --metrics`.

Imported only with --metrics, because it imports the Prometheus client.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, get_args
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edl_runtime.autoscale.history import JobState
from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger
from edl_runtime.monitor.snapshot import JobLine, MonitorSnapshot
from edl_runtime.pods import Unit, unit_of
from edl_runtime.protocol.address import check_exposure, has_token

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = get_logger(__name__)

HOST = "127.0.0.1"
"""Default address to bind. Any other than loopback needs a token."""

MOST_CONNECTIONS = 16
"""Each has a thread before its token is checked, so that clients without a token must be few."""

SHUTDOWN_POLL_S = 0.05


_NO_LABELS: tuple[str, ...] = ()
_OF_JOB = ("name", "dag", "task")  # "job" is Prometheus's own label
_BY_JOB = (*_OF_JOB, "kind")

_RESOURCES = {
    "edl_capacity": "Capacity of all nodes",
    "edl_reserved": "Reserved on all nodes, by anything that runs there",
    "edl_reserved_by_jobs": "Reserved by running instances of jobs and pools",
    "edl_training_capacity": "What jobs and pools may use, by traffic windows and the highest load",
}
"""Name and meaning of the metrics of resources, of which there is one for each unit."""

_METRICS = (
    ("edl_look_timestamp_seconds", "Time of the snapshot, in Unix seconds.", _NO_LABELS),
    ("edl_plan_timestamp_seconds", "Time of the last rescaling plan, in Unix seconds.", _NO_LABELS),
    ("edl_window", "1 for the traffic window that holds.", ("window",)),
    ("edl_jobs", "Trainings that have not ended, by phase: running, pending or suspended.", ("phase",)),
    ("edl_instances", "Running instances.", _BY_JOB),
    ("edl_wanted_instances", "Requested instances; 0 while a job is suspended.", _BY_JOB),
    ("edl_target_instances", "Instances that the last plan gives a job or pool.", _BY_JOB),
    ("edl_last_step_timestamp_seconds", "Time of a training's last step, in Unix seconds.", _OF_JOB),
    (
        "edl_straggler_ratio",
        "How many times as long as its peers a trainer computes in a step that has been slower for long.",
        (*_OF_JOB, "index"),
    ),
    *(
        (f"{name}_{unit}", f"{meaning}, in {unit}.", ("resource",))
        for name, meaning in _RESOURCES.items()
        for unit in get_args(Unit)
    ),
    ("edl_pool_teachers", "Teachers registered in a pool.", ("pool",)),
    ("edl_pool_students", "Students registered in a pool.", ("pool",)),
    ("edl_pool_busy_ratio", "Share of their time that a pool's teachers work.", ("pool",)),
    ("edl_pool_waiting_ratio", "Share of their time that a pool's students wait for teachers.", ("pool",)),
)
"""Name, meaning and labels. The values are in `_values`, in the same order."""


class MonitorCollector(Collector):
    """Collects the metrics of the last snapshot."""

    def __init__(self, last: Callable[[], MonitorSnapshot]) -> None:
        self._last = last

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each metric. A value that is None is left out."""
        for (name, meaning, labels), values in zip(_METRICS, _values(self._last()), strict=True):
            family = GaugeMetricFamily(name, meaning, labels=labels)
            for label_values, value in values:
                if value is not None:
                    family.add_metric(label_values, value)
            yield family


def _values(seen: MonitorSnapshot) -> Iterator[Iterable[tuple[Sequence[str], float | None]]]:
    """Yield for each of `_METRICS` its label values, each with a value."""
    yield [((), seen.at)]
    yield [((), seen.planned_at)]
    yield [((seen.window,), 1.0)] if seen.window else []
    states = Counter(line.state for line in seen.jobs if line.kind == "trainer")
    yield [((state,), states[state]) for state in get_args(JobState)]
    for field in ("running", "wanted", "target"):
        yield [((*_labels(line), line.kind), getattr(line, field)) for line in seen.jobs]
    yield [(_labels(line), line.last_step_at) for line in seen.jobs]
    yield [((*_labels(line), str(index)), times) for line in seen.jobs for index, times in line.stragglers.items()]
    for field in ("total", "reserved", "ours", "allowed"):
        for unit in get_args(Unit):
            yield [((name,), getattr(use, field)) for name, use in seen.use.items() if unit_of(name) == unit]
    for field in ("teachers", "students", "busy", "waiting"):
        yield [((pool.name,), getattr(pool, field)) for pool in seen.pools]


def _labels(line: JobLine) -> tuple[str, str, str]:
    """Return a job's name, which differs from run to run, and the DAG and task that have started it, if any have."""
    return (line.name, line.origin.dag_id, line.origin.task_id) if line.origin else (line.name, "", "")


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "PORT" or "HOST:PORT". Raises SpecError."""
    host, colon, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or (colon and not host):
        raise SpecError("--metrics", text, "PORT, or HOST:PORT, with a port of 1 to 65535, or 0 for a free one")
    return host.strip("[]") or HOST, int(port)


@contextmanager
def serving(last: Callable[[], MonitorSnapshot], host: str, port: int, token: str = "") -> Iterator[str]:
    """Serve the metrics of the last snapshot in a thread, and give their URL. Clients need the bearer token, if any.

    Raises SpecError for an address that can't be bound, and for one off loopback without a token.
    """
    check_exposure(host, token, "EDL_MONITOR_TOKEN")
    registry = CollectorRegistry()
    registry.register(MonitorCollector(last))
    try:
        server = make_server(host, port, _guarded(make_wsgi_app(registry), token), _Server, _Handler)
    except OSError as error:
        given = f"{host}:{port}"
        raise SpecError("--metrics", given, f"an address that can be bound ({error.strerror})") from error
    thread = threading.Thread(target=server.serve_forever, args=(SHUTDOWN_POLL_S,), name="edl metrics", daemon=True)
    thread.start()
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection; when there are too many, the oldest is closed."""

    daemon_threads = True
    request_queue_size = 128  # with the default of 5, idle connections fill it, and a scrape is retried seconds later

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
                with suppress(OSError):  # its thread then reads the end of the stream, and closes it
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log nothing of a client that has gone or says nothing: anybody may connect, as often as he likes."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("metrics.not_answered", exc_info=error)


class _Handler(WSGIRequestHandler):
    timeout = 10.0

    def log_message(self, *_: object) -> None:
        """Log nothing: each scrape would be a line."""


def _guarded(app: WSGIApplication, token: str) -> WSGIApplication:
    """Return the app behind a check of the bearer token, if there is one."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if not has_token(environ.get("HTTP_AUTHORIZATION", ""), token):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"the bearer token is missing or wrong; it is in EDL_MONITOR_TOKEN\n"]
        return app(environ, start_response)

    return answer
