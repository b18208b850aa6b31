"""Means of repeated runs with their 95 % confidence intervals, by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# fmt: off
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
      2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
# fmt: on
"""The 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom."""


class Spread(NamedTuple):
    """The mean of some runs. `deviation` and `margin` are None for a single run.

    - `deviation`: the standard deviation of the runs.
    - `margin`: the 95 % confidence interval of the mean is `mean` ± `margin`.
    """

    mean: float
    deviation: float | None
    margin: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return None without values."""
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], None, None)
        return cls(statistics.mean(values), statistics.stdev(values), _margin(values))

    def text(self, form: str) -> str:
        mean = form.format(self.mean)
        return mean if self.margin is None else f"{mean} ± {form.format(self.margin)}"


class Gain(NamedTuple):
    """A difference of means with its 95 % confidence interval, from `low` to `high`.

    `paired`: of pairs of runs with the same seed; otherwise by Welch's method for independent runs.
    """

    mean: float
    low: float
    high: float
    paired: bool

    @classmethod
    def of(cls, values: Sequence[float], baseline: Sequence[float], *, paired: bool) -> Gain | None:
        """Return the gain of `values` over `baseline`; None if either has less than two runs."""
        if min(len(values), len(baseline)) < 2:
            return None
        if paired:
            margin = _margin([value - other for value, other in zip(values, baseline, strict=True)])
        else:
            margin = _welch_margin(values, baseline)
        mean = statistics.mean(values) - statistics.mean(baseline)
        return cls(mean, mean - margin, mean + margin, paired)

    @property
    def verdict(self) -> str:
        """What the interval shows: "a gain", "a loss", or "no difference shown" if 0 is in it."""
        return "a gain" if self.low > 0 else "a loss" if self.high < 0 else "no difference shown"


def t_quantile(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t for 1 degree of freedom or more, to three digits.

    Fractions are interpolated, which makes the quantile a little larger than it is.
    """
    whole = int(degrees)
    quantile = _quantile(whole)
    return quantile + (degrees - whole) * (_quantile(whole + 1) - quantile)


def _quantile(degrees: int) -> float:
    return _T[degrees - 1] if degrees <= len(_T) else 1.95996 + 2.3721 / degrees + 2.8225 / degrees**2


def _margin(values: Sequence[float]) -> float:
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def _welch_margin(values: Sequence[float], baseline: Sequence[float]) -> float:
    parts = [statistics.variance(each) / len(each) for each in (values, baseline)]
    total = sum(parts)
    if not total:
        return 0.0
    degrees = total**2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (values, baseline), strict=True))
    return t_quantile(degrees) * math.sqrt(total)
