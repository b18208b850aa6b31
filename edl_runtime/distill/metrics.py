"""What readers have done, as Prometheus reads it: put together from their own counts when it is asked for.

Only who shows metrics imports this module, and with it Prometheus's client.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edl_runtime.distill.stats import ReaderStats, combined_stats, final_stats

HOST = "127.0.0.1"
"""Prometheus's server asks nobody for a token, so it is for this machine only."""


class ReaderCollector(Collector):
    """Shows what `stats` counts, in a registry of your own: that of a reader or of a `JobReporter`.

    REGISTRY.register(ReaderCollector(reader.stats))
    """

    def __init__(self, stats: Callable[[], ReaderStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Return the counts of now."""
        now = self._stats()
        yield CounterMetricFamily("edl_distill_batches", "Batches that the script took.", now.batches)
        yield CounterMetricFamily("edl_distill_samples", "Samples that the script took.", now.samples)
        yield CounterMetricFamily(
            "edl_distill_cached_samples", "Samples among them that no teacher was asked about.", now.cached
        )
        yield _labelled(
            CounterMetricFamily(
                "edl_distill_wait_seconds", "Seconds that the script waited, and for whom.", labels=["for"]
            ),
            {"source": now.waited_for_source_s, "teachers": now.waited_s - now.waited_for_source_s},
        )
        yield _labelled(
            CounterMetricFamily("edl_distill_answers", "Requests whose answers the script took.", labels=["teacher"]),
            now.answered,
        )
        yield CounterMetricFamily(
            "edl_distill_retries", "Requests asked again because a teacher failed or left.", now.retries
        )
        yield CounterMetricFamily(
            "edl_distill_hedges", "Requests that a second teacher was asked because the first took long.", now.hedges
        )
        yield GaugeMetricFamily("edl_distill_queued_requests", "Requests that wait for a teacher.", now.queued)
        yield GaugeMetricFamily("edl_distill_requests_in_flight", "Requests that teachers are asked.", now.in_flight)
        yield GaugeMetricFamily("edl_distill_teachers", "Teachers in use, without those in quarantine.", now.teachers)
        yield _labelled(
            GaugeMetricFamily("edl_distill_quarantined", "1 for a teacher in quarantine, else 0.", labels=["teacher"]),
            {who: who in now.quarantined for who in sorted(now.answered.keys() | now.quarantined.keys())},
        )


class MetricsEndpoint:
    """Shows at http://127.0.0.1:PORT/metrics what all readers of this process have done, until the process ends."""

    def __init__(self, port: int) -> None:
        """Listen. Raises OSError."""
        self._lock = threading.Lock()
        self._shown: list[Callable[[], ReaderStats]] = []
        self._before = ReaderStats()  # of readers that are no more: a count never falls
        registry = CollectorRegistry()
        registry.register(ReaderCollector(self.stats))
        start_http_server(port, HOST, registry)

    @contextmanager
    def showing(self, stats: Callable[[], ReaderStats]) -> Iterator[None]:
        """Add what `stats` counts; what it has counted at the end of the block stays."""
        with self._lock:
            self._shown.append(stats)
        try:
            yield
        finally:
            last = final_stats(stats())
            with self._lock:
                self._shown.remove(stats)
                self._before = combined_stats([self._before, last])

    def stats(self) -> ReaderStats:
        """Return what all readers have done together."""
        with self._lock:
            return combined_stats([self._before, *(stats() for stats in self._shown)])


_endpoints: dict[tuple[int, int], MetricsEndpoint] = {}
_endpoints_lock = threading.Lock()


def metrics_endpoint(port: int) -> MetricsEndpoint:
    """Return this process's endpoint at the port, a new one if there is none. Raises OSError when another listens."""
    here = os.getpid(), port  # a forked child has the dictionary, but not the threads
    with _endpoints_lock:
        if here not in _endpoints:
            _endpoints[here] = MetricsEndpoint(port)
        return _endpoints[here]


def _labelled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family
