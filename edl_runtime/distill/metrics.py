"""Readers' counts as Prometheus metrics, computed when they are scraped.

Imports Prometheus's client, so it is imported only where metrics are served.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edl_runtime.distill.stats import ReaderStats, StatsOfReaders

HOST = "127.0.0.1"
"""Prometheus's server has no authentication, so it listens on this machine only."""


def _waits(now: ReaderStats) -> dict[str, float]:
    return {"source": now.waited_for_source_s, "teachers": now.waited_s - now.waited_for_source_s}


def _quarantined(now: ReaderStats) -> dict[str, bool]:
    return {teacher: teacher in now.quarantined for teacher in sorted({*now.answered, *now.quarantined})}


_Metrics = tuple[tuple[str, str, str, Callable[[ReaderStats], Any]], ...]
"""Name, label if it has one, and help of each metric; and its value or, for each label, values."""

_COUNTERS: _Metrics = (
    ("batches", "", "Batches that the script took.", attrgetter("batches")),
    ("samples", "", "Samples that the script took.", attrgetter("samples")),
    ("cached_samples", "", "Samples among them that were in the cache.", attrgetter("cached")),
    ("wait_seconds", "for", "Seconds that the script waited, for its source or for teachers.", _waits),
    ("answers", "teacher", "Requests whose answers the script took.", attrgetter("answered")),
    ("retries", "", "Requests sent again because a teacher failed or left.", attrgetter("retries")),
    ("hedges", "", "Requests also sent to a second teacher, the first being slow.", attrgetter("hedges")),
)
_GAUGES: _Metrics = (
    ("queued_requests", "", "Requests that wait for a teacher.", attrgetter("queued")),
    ("requests_in_flight", "", "Requests at teachers.", attrgetter("in_flight")),
    ("teachers", "", "Teachers in use, without those in quarantine.", attrgetter("teachers")),
    ("quarantined", "teacher", "1 for a teacher in quarantine, else 0.", _quarantined),
)


class ReaderCollector(Collector):
    """A Prometheus collector of what `stats` returns, for a registry of your own: of a reader or of a `JobReporter`.

    REGISTRY.register(ReaderCollector(reader.stats))
    """

    def __init__(self, stats: Callable[[], ReaderStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        now = self._stats()
        for kind, metrics in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, label, text, value_of in metrics:
                family = kind(f"edl_distill_{name}", text, labels=[label] if label else [])
                value = value_of(now)
                for each, one in value.items() if label else [("", value)]:
                    family.add_metric([each] if label else [], one)
                yield family


_endpoints: dict[tuple[int, int], StatsOfReaders] = {}
_endpoints_lock = threading.Lock()


def metrics_endpoint(port: int) -> StatsOfReaders:
    """Return what is served at http://127.0.0.1:PORT/metrics until this process ends: all readers added to it.

    Starts the endpoint if there is none. Raises OSError when another process listens there.
    """
    here = os.getpid(), port  # a forked child inherits the dictionary, but not the server's thread
    with _endpoints_lock:
        if here not in _endpoints:
            served, registry = StatsOfReaders(), CollectorRegistry()
            registry.register(ReaderCollector(served.stats))
            start_http_server(port, HOST, registry)
            _endpoints[here] = served
        return _endpoints[here]
