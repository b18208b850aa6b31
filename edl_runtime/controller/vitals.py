"""What a controller tells of itself: whether it is ready, and its metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import Metric

SILENT_S = 30.0
"""How long ago the API server may have answered last."""

clock = time.monotonic


class Vitals:
    """Counts and states of one controller.

    - `leads`: whether it holds the Lease. `answered_at`: when the API server last answered about that, by `clock`.
    - `windows_problem`: why there are no traffic windows, or none of the present ConfigMap; empty if all is well.
    - `passes`: "done" and "failed" ones. `last_pass_at`: when the last one was done, in Unix seconds.
    - `failures`: what has failed and is tried again, by the event in the log.
    """

    def __init__(self) -> None:
        self.leads = False
        self.answered_at: float | None = None
        self.windows_problem = ""
        self.passes: Counter[str] = Counter()
        self.last_pass_at = 0.0
        self.failures: Counter[str] = Counter()

    def problem(self, now: float) -> str:
        """Return why it is not ready, in words that anybody may read; empty if it is. `now`: by `clock`."""
        if self.answered_at is None or now > self.answered_at + SILENT_S:
            return "the Kubernetes API does not answer"
        return self.windows_problem

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics; called by the registry."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        for name, label, meaning, value_of in COUNTERS:
            counter = CounterMetricFamily(f"edl_controller_{name}", meaning, labels=[label])
            for key, value in sorted(value_of(self).items()):
                counter.add_metric([key], value)
            yield counter
        for name, meaning, value_of in GAUGES:
            yield GaugeMetricFamily(f"edl_controller_{name}", meaning, value=value_of(self))


COUNTERS: tuple[tuple[str, str, str, Callable[[Vitals], Counter[str]]], ...] = (
    ("passes", "result", "Rescaling passes: done or failed.", lambda vitals: vitals.passes),
    (
        "failures",
        "event",
        "What has failed and is tried again, by the event in the log.",
        lambda vitals: vitals.failures,
    ),
)
GAUGES: tuple[tuple[str, str, Callable[[Vitals], Any]], ...] = (
    ("leads", "1 for the controller that leads, 0 for those that wait.", lambda vitals: vitals.leads),
    (
        "windows_valid",
        "0 while the ConfigMap of traffic windows has no valid ones.",
        lambda vitals: not vitals.windows_problem,
    ),
    (
        "last_pass_timestamp_seconds",
        "Time of the last pass that was done, in Unix seconds.",
        lambda vitals: vitals.last_pass_at,
    ),
)
