"""Rates over the last seconds, and busy times."""

from __future__ import annotations

import pytest

from edl_runtime.meter import WINDOW_S, BusyMeter, RateMeter


def test_a_rate_looks_back_a_window() -> None:
    """A slow beginning is forgotten, and so is a fast one."""
    meter = RateMeter(0.0)
    assert meter.rate(0, 0.0) == 0
    count = 0
    for second in range(1, 31):
        count += 100 if second <= 15 else 10
        meter.mark(count, float(second))
        if second == 15:
            assert meter.rate(count, 15.0) == pytest.approx(100)
    assert meter.rate(count, 30.0) == pytest.approx(10)


def test_a_pause_shows() -> None:
    """Nothing delivered for a whole window is a rate of zero."""
    meter = RateMeter(0.0)
    meter.mark(50, 1.0)
    assert meter.rate(50, 1.0 + 2 * WINDOW_S) == 0


def test_what_took_longer_than_a_window_counts() -> None:
    """A batch that comes after a minute is not lost because nothing was marked in between."""
    meter = RateMeter(0.0)
    meter.mark(60, 60.0)
    assert meter.rate(60, 60.0) == pytest.approx(1)
    assert meter.rate(60, 65.0) == pytest.approx(0.5)


def test_a_count_may_begin_above_zero() -> None:
    """What was before the beginning is no growth."""
    meter = RateMeter(0.0, 1000)
    assert meter.rate(1020, 2.0) == pytest.approx(10)


def test_busy_times_add_up_over_all_and_not_over_one_s_tasks() -> None:
    """Two tasks of one count once while they overlap, those of two count twice; what goes on counts already."""
    busy = BusyMeter(0.0)
    busy.begin("a", 1.0)
    busy.begin("a", 2.0)
    busy.begin("b", 3.0)
    assert busy.total_s(4.0) == pytest.approx(3 + 1)
    busy.end("a", 4.0)
    busy.end("a", 5.0)
    busy.end("b", 6.0)
    assert busy.total_s(100.0) == pytest.approx(4 + 3)
