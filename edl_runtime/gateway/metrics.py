"""Counts of the gateway as Prometheus metrics, computed when they are scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import Metric

    from edl_runtime.gateway.pool import FollowedPool

GONE = 499
"""In place of an HTTP status: the caller hung up."""


_Metrics = tuple[tuple[str, str, str, Callable[["FollowedPool"], Any]], ...]
"""Name, label, and help of each metric; and its value in a pool."""

_COUNTERS: _Metrics = (
    ("sequences", "pool", "Sequences answered.", attrgetter("stats.sequences")),
    ("tokens", "pool", "Tokens of these sequences.", attrgetter("stats.tokens")),
    ("answers", "pool", "Requests answered.", attrgetter("stats.answers")),
    ("answer_seconds", "pool", "Seconds from their arrival to their answers, added up.", attrgetter("stats.answer_s")),
    ("parts", "pool", "Parts of requests that teachers answered.", attrgetter("stats.parts")),
    ("failures", "pool", "Parts that a teacher failed to answer.", attrgetter("stats.failures")),
    ("retries", "pool", "Parts sent again because a teacher failed.", attrgetter("stats.retries")),
    ("hedges", "pool", "Parts also sent to a second teacher, the first being slow.", attrgetter("stats.hedges")),
    ("hedges_won", "pool", "Parts that the second teacher answered first.", attrgetter("stats.hedges_won")),
)
_GAUGES: _Metrics = (
    ("tokens_waiting", "pool", "Tokens of the parts that wait for a teacher.", attrgetter("queue.tokens_waiting")),
    ("tokens_in_flight", "pool", "Tokens of the parts at teachers.", lambda pool: sum(_each(pool, "tokens"))),
    ("teachers", "pool", "Teachers in use, without those in quarantine.", lambda pool: sum(_each(pool, "good"))),
    ("quarantined", "pool", "Teachers in quarantine.", lambda pool: len(pool.queue.quarantined)),
)


def _each(pool: FollowedPool, field: str) -> Iterator[Any]:
    return map(attrgetter(field), pool.queue.teachers.values())


class GatewayCollector:
    """A Prometheus collector of the pools that a gateway follows, and of its answers by pool, route and status."""

    def __init__(self, pools: Mapping[str, FollowedPool]) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
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

        text = f"Requests by route and status; {GONE}: the caller hung up."
        family = CounterMetricFamily("edl_gateway_requests", text, labels=["pool", "route", "status"])
        for (pool, route, status), count in sorted(self.requests.items()):
            family.add_metric([pool, route, str(status)], count)
        yield family
        for kind, metrics in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, label, text, value_of in metrics:
                one = kind(f"edl_gateway_{name}", text, labels=[label])
                for pool, followed in sorted(self._pools.items()):
                    one.add_metric([pool], value_of(followed))
                yield one
