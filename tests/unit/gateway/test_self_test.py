"""Which teachers of a pool have other weights."""

from __future__ import annotations

import pytest

from edl_runtime.gateway.self_test import difference, others_of
from edl_runtime.gateway.teachers import TestScores

A: TestScores = [(2, -1.0), (3, -2.0), (4, -3.0)]
NEAR_A: TestScores = [(2, -1.1), (3, -1.9), (4, -3.2)]
B: TestScores = [(2, -2.0), (3, -1.0), (4, -3.0)]


@pytest.mark.parametrize(
    ("tested", "others"),
    [
        ([], []),
        ([A], []),
        ([A, NEAR_A], []),
        ([A, B], [1]),
        ([B, A], [1]),
        ([B, A, NEAR_A], [0]),
        ([A, B, NEAR_A, B], [1, 3]),
    ],
)
def test_most_have_the_pool_s_weights(tested: list[TestScores], others: list[int]) -> None:
    """The oldest ones, where as many have others."""
    assert others_of(tested) == others


def test_teachers_with_other_limits_are_compared_where_they_were_asked_the_same() -> None:
    """A shorter one by its tokens alone, one of another vocabulary up to the first other token."""
    assert difference(A, NEAR_A[:1]) == pytest.approx(0.1)
    assert difference(A, [(2, -1.0), (9, -9.0)]) == 0.0
    assert difference(A, [(7, -9.0)]) == 0.0
