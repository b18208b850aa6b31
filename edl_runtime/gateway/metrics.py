"""Counts of the gateway as Prometheus metrics, computed when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from edl_runtime.teacher.metrics import DROPPED

if TYPE_CHECKING:
    from prometheus_client import Metric

    from edl_runtime.gateway.pool import FollowedPool

_Metrics = tuple[tuple[str, str, Callable[["FollowedPool"], Any]], ...]
"""Name and help of each metric, whose label is the pool; and its value there."""

_COUNTERS: _Metrics = (
    ("sequences", "Sequences answered.", attrgetter("stats.sequences")),
    ("tokens", "Tokens of these sequences.", attrgetter("stats.tokens")),
    ("answers", "Requests answered.", attrgetter("stats.answers")),
    ("answer_seconds", "Seconds from their arrival to their answers, added up.", attrgetter("stats.answer_s")),
    ("parts", "Parts of requests that teachers answered.", attrgetter("stats.parts")),
    ("failures", "Parts that a teacher failed to answer.", attrgetter("stats.failures")),
    ("retries", "Parts sent again because a teacher failed.", attrgetter("stats.retries")),
    ("hedges", "Parts also sent to a second teacher, the first being slow.", attrgetter("stats.hedges")),
    ("hedges_won", "Parts that the second teacher answered first.", attrgetter("stats.hedges_won")),
)
_GAUGES: _Metrics = (
    ("tokens_waiting", "Tokens of the parts that wait for a teacher.", attrgetter("queue.tokens_waiting")),
    ("tokens_in_flight", "Tokens of the parts at teachers.", lambda pool: sum(_each(pool, "tokens"))),
    ("teachers", "Teachers in use, without those in quarantine.", lambda pool: sum(_each(pool, "good"))),
    ("quarantined", "Teachers in quarantine.", lambda pool: len(pool.queue.quarantined)),
)


def _each(pool: FollowedPool, field: str) -> Iterator[Any]:
    return map(attrgetter(field), pool.queue.teachers.values())


class GatewayCollector:
    """A Prometheus collector of the pools that a gateway follows, and of its answers by pool, route and status."""

    def __init__(self, pools: Mapping[str, FollowedPool]) -> None:
        self._pools = pools

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics; called by the registry."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        text = f"Requests by route and status; {DROPPED}: the caller hung up."
        family = CounterMetricFamily("edl_gateway_requests", text, labels=["pool", "route", "status"])
        for pool, followed in sorted(self._pools.items()):
            for (route, status), count in sorted(followed.stats.requests.items()):
                family.add_metric([pool, route, str(status)], count)
        yield family
        for kind, metrics in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, text, value_of in metrics:
                one = kind(f"edl_gateway_{name}", text, labels=["pool"])
                for pool, followed in sorted(self._pools.items()):
                    one.add_metric([pool], value_of(followed))
                yield one
