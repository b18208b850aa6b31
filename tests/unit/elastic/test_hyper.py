"""How the learning rate follows the number of instances."""

from __future__ import annotations

import pytest

from edl_runtime.elastic.hyper import Scale, factor_of


def test_factors_of_the_known_scalings() -> None:
    """The script's own rate is that of one instance."""
    assert [factor_of("fixed", size) for size in (1, 4)] == [1, 1]
    assert [factor_of("linear", size) for size in (1, 4)] == [1, 4]
    assert [factor_of("sqrt", size) for size in (1, 4)] == [1, 2]
    assert factor_of(lambda size: 1 + size, 4) == 5


def test_a_rate_grows_by_and_by_and_falls_at_once() -> None:
    """Warm-up is for what could diverge."""
    grown = Scale().towards(4.0, 10, 3)
    assert [grown.at(step) for step in (10, 11, 12, 13, 99)] == [1.75, 2.5, 3.25, 4.0, 4.0]
    assert grown.towards(4.0, 11, 3) is grown
    shrunk = grown.towards(2.0, 20, 3)
    assert [shrunk.at(step) for step in (20, 21)] == [2.0, 2.0]


def test_a_change_in_the_middle_of_a_warm_up_goes_on_from_there() -> None:
    """No step of the way is jumped over."""
    again = Scale().towards(4.0, 0, 3).towards(5.0, 2, 1)
    assert again.begin == 3.25
    assert again.at(2) == pytest.approx((3.25 + 5) / 2)
    assert again.at(3) == 5
