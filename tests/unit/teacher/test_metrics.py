"""A teacher's Prometheus metrics, and the load that it reports."""

from __future__ import annotations

import pytest

from edl_runtime.teacher.metrics import DeviceLoad, TeacherMetrics


def test_metrics_are_in_prometheus_text_format() -> None:
    """Each has its meaning and kind; buckets count all runs up to their bound, and gauges are asked when shown."""
    metrics = TeacherMetrics()
    metrics.gauges["edl_teacher_connections"] = "Clients that are connected.", lambda: 3
    for status in (200, 500, 200):
        metrics.count_answer(status)
    for rows in (0, 4, 5, 1000):
        metrics.count_run(rows, 0.25)
    text = metrics.render().decode()
    assert text.endswith("\n")
    lines = text.splitlines()
    assert [line for line in lines if "requests_total" in line] == [
        "# HELP edl_teacher_requests_total Requests to the model and refusals, by status; 499: client disconnected.",
        "# TYPE edl_teacher_requests_total counter",
        'edl_teacher_requests_total{status="200"} 2.0',
        'edl_teacher_requests_total{status="500"} 1.0',
    ]
    buckets = [float(line.rsplit(" ", 1)[1]) for line in lines if "_bucket" in line]
    assert buckets == [1, 1, 2, 3, 3, 3, 3, 3, 3, 4]
    assert lines[-8:] == [
        "edl_teacher_run_rows_count 4.0",
        "edl_teacher_run_rows_sum 1009.0",
        "# HELP edl_teacher_busy_seconds_total Seconds that the model ran, on all devices together.",
        "# TYPE edl_teacher_busy_seconds_total counter",
        "edl_teacher_busy_seconds_total 1.0",
        "# HELP edl_teacher_connections Clients that are connected.",
        "# TYPE edl_teacher_connections gauge",
        "edl_teacher_connections 3.0",
    ]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_teacher_is_busy_while_a_request_runs_or_waits() -> None:
    """Of two devices, one with two requests at a time for five of ten seconds is a quarter, and it fades."""
    clock = Clock()
    load = DeviceLoad(2, clock)
    assert (load.report().busy, load.report().over_s) == (0, 0)
    load.begin(0)
    clock.now = 1.0
    load.begin(0)
    load.end(0)
    clock.now = 5.0
    assert load.report().busy == pytest.approx(0.5)
    load.end(0)
    clock.now = 10.0
    report = load.report()
    assert (report.busy, report.over_s) == (pytest.approx(0.25), 10)
    for second in range(11, 21):
        clock.now = float(second)
        report = load.report()
    assert (report.busy, report.over_s) == (pytest.approx(0.0), 10)


def test_what_was_before_it_joined_is_not_in_it() -> None:
    """A model that took a minute to load has not been idle for that minute."""
    clock = Clock()
    load = DeviceLoad(1, clock)
    clock.now = 60.0
    load.report()
    load.begin(0)
    clock.now = 61.0
    report = load.report()
    assert (report.busy, report.over_s) == (pytest.approx(1.0), 1)
