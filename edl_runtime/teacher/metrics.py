"""A teacher's Prometheus metrics, and the load that it reports to its pool."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from edl_runtime.meter import WINDOW_S, BusyMeter, RateMeter
from edl_runtime.pool_reports import TeacherReport

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Buckets of the histogram of rows."""

DROPPED = 499
"""In place of an HTTP status: the request was dropped because its client had disconnected."""


class Totals(NamedTuple):
    """Counts since the start.

    - `answered`, `refused`: requests with status 200, and with another.
    - `runs`, `rows`, `busy_s`: the model's runs, their rows, and how long they took.
    """

    answered: int
    refused: int
    runs: int
    rows: int
    busy_s: float


class TeacherMetrics:
    """Counts in plain numbers, which is cheap; Prometheus's metrics are built from them when they are collected.

    `gauges`: description and value by name.
    """

    def __init__(self) -> None:
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._answers: Counter[int] = Counter()
        self._runs = [0] * (len(BOUNDS) + 1)
        self._rows = 0
        self._busy_s = 0.0

    def count_answer(self, status: int) -> None:
        """Count an answer, or a request that was dropped."""
        self._answers[status] += 1

    def count_refusal(self, status: int) -> None:
        """Count an answer without the model if it is a refusal."""
        if status >= 400:
            self.count_answer(status)

    def count_run(self, rows: int, busy_s: float) -> None:
        self._runs[bisect_left(BOUNDS, rows)] += 1
        self._rows += rows
        self._busy_s += busy_s

    def totals(self) -> Totals:
        answered = self._answers[200]
        return Totals(answered, self._answers.total() - answered, sum(self._runs), self._rows, self._busy_s)

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics; called by the registry."""
        from prometheus_client import metrics_core as core

        meaning = f"Requests to the model and refusals, by status; {DROPPED}: client disconnected."
        requests = core.CounterMetricFamily("edl_teacher_requests", meaning, labels=["status"])
        for status, count in sorted(self._answers.items()):
            requests.add_metric([str(status)], count)
        yield requests
        yield core.HistogramMetricFamily(
            "edl_teacher_run_rows",
            "Rows of the model's runs, each of which may answer several requests.",
            buckets=list(zip((*map(str, BOUNDS), "+Inf"), accumulate(self._runs), strict=True)),
            sum_value=self._rows,
        )
        meaning = "Seconds that the model ran, on all devices together."
        yield core.CounterMetricFamily("edl_teacher_busy_seconds", meaning, self._busy_s)
        for name, (meaning, value) in self.gauges.items():
            yield core.GaugeMetricFamily(name, meaning, value())


class DeviceLoad:
    """Measures the share of time in which a teacher's `devices` are busy, for the report to its pool."""

    def __init__(self, devices: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._devices = devices
        self._clock_s = clock_s
        self._busy = BusyMeter(clock_s())
        self._meter: RateMeter | None = None
        self._since = 0.0

    def begin(self, device: int) -> None:
        """Count a request of this device, running or waiting."""
        self._busy.begin(device, self._clock_s())

    def end(self, device: int) -> None:
        self._busy.end(device, self._clock_s())

    def report(self) -> TeacherReport:
        """Return the load of the last WINDOW_S; meant to be called about once a second, from the start on."""
        now = self._clock_s()
        busy_s = self._busy.total_s(now) / self._devices
        if self._meter is None:
            self._meter, self._since = RateMeter(now, busy_s), now
        self._meter.mark(busy_s, now)
        return TeacherReport(busy=min(1.0, self._meter.rate(busy_s, now)), over_s=min(WINDOW_S, now - self._since))
