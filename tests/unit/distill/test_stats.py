"""Rates over the last seconds."""

from __future__ import annotations

import pytest

from edl_runtime.distill.stats import WINDOW_S, Meter


def test_a_rate_looks_back_a_window() -> None:
    """A slow beginning is forgotten, and so is a fast one."""
    meter = Meter(0.0)
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
    meter = Meter(0.0)
    meter.mark(50, 1.0)
    assert meter.rate(50, 1.0 + 2 * WINDOW_S) == 0
