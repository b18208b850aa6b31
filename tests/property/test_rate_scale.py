"""The learning rate's factor, for any sequence of sizes, steps between them, and warm-ups."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.elastic.training.learning_rate import RateScale

SIZES = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.0]), st.integers(0, 30)), min_size=1, max_size=12)
"""Factors of the sizes that a group has one after another, and how many steps it makes at each."""


def factors(sizes: list[tuple[float, int]], warm_up: int) -> list[tuple[float, float]]:
    """Return the target and the factor of each step."""
    scale, found = RateScale(), list[tuple[float, float]]()
    for target, steps in sizes:
        scale = scale.towards(target, len(found), warm_up)
        found += [(target, scale.at(len(found) + more)) for more in range(steps)]
    return found


@given(SIZES, st.integers(0, 20))
def test_a_factor_is_never_above_what_the_size_wants(sizes: list[tuple[float, int]], warm_up: int) -> None:
    """Without a warm-up it is that at once."""
    for target, factor in factors(sizes, warm_up):
        assert 0 < factor <= target
        assert warm_up or factor == target


@given(SIZES, st.integers(1, 20))
def test_what_was_reached_is_reached_again_at_once(sizes: list[tuple[float, int]], warm_up: int) -> None:
    """However often and for however long the group was smaller in between."""
    reached = 0.0
    for target, factor in factors(sizes, warm_up):
        assert factor >= min(target, reached) - 1e-9
        reached = max(reached, factor)


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from([1.0, 2.0]), st.integers(0, 3)), max_size=6), st.data())
def test_going_down_and_back_loses_no_progress(
    warm_up: int, smaller: list[tuple[float, int]], data: st.DataObject
) -> None:
    """The steps at the full size have the factors of a warm-up that nothing interrupts."""
    before = data.draw(st.integers(1, warm_up + 3))
    plain = [factor for _, factor in factors([(3.0, warm_up + 10)], warm_up)]
    found = [factor for _, factor in factors([(3.0, before), *smaller, (3.0, warm_up + 10)], warm_up)]
    lost = sum(steps for _, steps in smaller)
    resumed = found[:before] + found[before + lost :]
    assert all(now >= wanted - 1e-9 for now, wanted in zip(resumed, plain, strict=False))
    if plain[before - 1] >= 2.0:  # else steps at a smaller size are steps of the warm-up, too
        assert all(math.isclose(now, wanted) for now, wanted in zip(resumed, plain, strict=False))


@given(st.floats(0.1, 8.0), st.floats(0.1, 8.0), st.integers(1, 20))
def test_a_first_growth_warms_up(low: float, by: float, warm_up: int) -> None:
    """In equal parts; also where the first size wants less than the script's own rate, which no step has had then."""
    grown = [factor for _, factor in factors([(low, 100), (low + by, warm_up + 2)], warm_up)][99:]
    rises = [after - before for before, after in pairwise(grown)]
    assert all(math.isclose(rise, by / (warm_up + 1), rel_tol=1e-6) for rise in rises[:-1])
    assert grown[-2:] == [low + by] * 2
