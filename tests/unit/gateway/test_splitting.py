"""How requests are split into parts."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from edl_runtime.gateway.splitting import MAX_ROWS, MAX_TOKENS, MIN_TOKENS, PARTS_PER_TEACHER, split


@given(st.lists(st.integers(0, 40_000), max_size=60), st.integers(0, 20))
def test_each_row_is_in_one_part_in_order(tokens: list[int], teachers: int) -> None:
    """And no part but one of a single row has more tokens than it may."""
    parts = split(tokens, teachers)
    assert [row for rows in parts for row in rows] == list(range(len(tokens)))
    assert all(len(rows) == 1 or sum(tokens[rows.start : rows.stop]) <= MAX_TOKENS for rows in parts)


def test_parts_have_even_tokens_not_rows() -> None:
    """A sequence as long as a hundred others is a part of its own."""
    tokens = [MIN_TOKENS, *[MIN_TOKENS // 100] * 100]
    assert split(tokens, 1) == [range(1), range(1, 101)]


def test_small_requests_are_not_split() -> None:
    """They would cost teachers more than they gain."""
    assert split([10] * 20, 8) == [range(20)]


def test_large_requests_have_parts_for_all_teachers() -> None:
    """A few each, so that a fast one gets more."""
    assert len(split([1000] * 64, 4)) == 4 * PARTS_PER_TEACHER


def test_a_part_has_no_more_rows_than_vllm_takes() -> None:
    """Its limit is one of prompts."""
    assert [len(rows) for rows in split([1] * (MAX_ROWS + 1), 1)] == [MAX_ROWS, 1]
