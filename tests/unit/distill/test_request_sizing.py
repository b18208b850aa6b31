"""How many rows a teacher is asked about at once."""

from __future__ import annotations

from edl_runtime.distill.dispatch_policy import (
    DEFAULT_ROWS,
    FAST_ANSWER_S,
    FAST_ANSWERS_TO_GROW,
    MAX_ROWS,
    SLOW_ANSWER_S,
    WARIER,
    RequestSizing,
)


def test_requests_to_fast_teachers_grow() -> None:
    """Twice as much after so many fast answers in a row, up to the most."""
    sizing = RequestSizing()
    seen = []
    for _ in range(4 * FAST_ANSWERS_TO_GROW):
        sizing.note(FAST_ANSWER_S)
        seen.append(sizing.rows)
    assert seen[FAST_ANSWERS_TO_GROW - 2 :: FAST_ANSWERS_TO_GROW] == [
        DEFAULT_ROWS,
        2 * DEFAULT_ROWS,
        MAX_ROWS,
        MAX_ROWS,
    ]


def test_slow_answers_make_requests_small_again() -> None:
    """A teacher that takes long is asked about as much as usual, and one in between about as much as before."""
    sizing = RequestSizing()
    for _ in range(2 * FAST_ANSWERS_TO_GROW):
        sizing.note(FAST_ANSWER_S)
    sizing.note(SLOW_ANSWER_S)
    assert sizing.rows == MAX_ROWS
    for _ in range(4):
        sizing.note(1.01 * SLOW_ANSWER_S)
    assert sizing.rows == DEFAULT_ROWS


def test_a_request_that_failed_makes_it_wary() -> None:
    """As much as usual is asked about, and for more the answers have to be fast for longer; several failed at once."""
    sizing = RequestSizing()
    for _ in range(2 * FAST_ANSWERS_TO_GROW):
        sizing.note(FAST_ANSWER_S)
    sizing.fail()
    sizing.fail()
    assert sizing.rows == DEFAULT_ROWS
    for _ in range(WARIER * FAST_ANSWERS_TO_GROW):
        assert sizing.rows == DEFAULT_ROWS
        sizing.note(FAST_ANSWER_S)
    assert sizing.rows == 2 * DEFAULT_ROWS


def test_answers_in_between_count_as_not_fast() -> None:
    """The answers have to be fast one after the other."""
    sizing = RequestSizing()
    for _ in range(2 * FAST_ANSWERS_TO_GROW):
        sizing.note(FAST_ANSWER_S)
        sizing.note(1.01 * FAST_ANSWER_S)
    assert sizing.rows == DEFAULT_ROWS
