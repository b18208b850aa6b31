"""Confidence intervals of repeated runs."""

from __future__ import annotations

import pytest

from edl_runtime.compare.intervals import Gain, Spread, t_quantile


@pytest.mark.slow
def test_quantiles_are_those_of_students_t() -> None:
    """For any number of runs; Welch's degrees of freedom are fractions."""
    stats = pytest.importorskip("scipy.stats")
    degrees = [*range(1, 40), *range(40, 500, 7)]
    assert [t_quantile(each) for each in degrees] == pytest.approx(stats.t.ppf(0.975, degrees), abs=1e-3)
    assert t_quantile(2.9) == pytest.approx(stats.t.ppf(0.975, 2.9), abs=0.05)


def test_a_mean_has_an_interval_from_two_runs_on() -> None:
    """A single run says nothing of the next."""
    assert Spread.of([]) is None
    assert Spread.of([0.5]) == (0.5, None, None)
    assert Spread.of([1.0, 2.0, 3.0]) == pytest.approx((2, 1, 4.303 / 3**0.5))


@pytest.mark.parametrize(
    ("values", "baseline", "verdict"),
    [
        ([0.92, 0.93, 0.94], [0.90, 0.91, 0.92], "a gain"),
        ([0.90, 0.91, 0.92], [0.92, 0.93, 0.94], "a loss"),
        ([0.92, 0.91, 0.93], [0.90, 0.93, 0.92], "no difference shown"),
    ],
)
def test_a_gain_is_one_if_its_interval_has_no_zero(values: list[float], baseline: list[float], verdict: str) -> None:
    """The other cases are said, too."""
    gain = Gain.of(values, baseline, paired=True)
    assert gain is not None
    assert gain.verdict == verdict
    assert Gain.of(values[:1], baseline, paired=False) is None


def test_independent_runs_are_compared_by_welch() -> None:
    """With fewer degrees of freedom where the ways vary by different amounts."""
    stats = pytest.importorskip("scipy.stats")
    values, baseline = [0.9, 0.95, 0.91, 0.99], [0.85, 0.86, 0.855]
    gain = Gain.of(values, baseline, paired=False)
    interval = stats.ttest_ind(values, baseline, equal_var=False).confidence_interval()
    assert gain is not None
    assert (gain.low, gain.high) == pytest.approx((interval.low, interval.high), abs=0.01)
