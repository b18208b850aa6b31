"""How many rows a teacher is asked about at once."""

from __future__ import annotations

from edl_runtime.distill.sizing import FAST_S, MOST_ROWS, SLOW_S, STEADY, USUAL_ROWS, WARIER, Sizing


def test_a_teacher_that_answers_at_once_is_asked_about_more() -> None:
    """Twice as much after so many fast answers in a row, up to the most."""
    sizing = Sizing()
    seen = []
    for _ in range(4 * STEADY):
        sizing.note(FAST_S)
        seen.append(sizing.rows)
    assert seen[STEADY - 2 :: STEADY] == [USUAL_ROWS, 2 * USUAL_ROWS, MOST_ROWS, MOST_ROWS]


def test_slow_answers_make_requests_small_again() -> None:
    """A teacher that takes long is asked about as much as usual, and one in between about as much as before."""
    sizing = Sizing()
    for _ in range(2 * STEADY):
        sizing.note(FAST_S)
    sizing.note(SLOW_S)
    assert sizing.rows == MOST_ROWS
    for _ in range(4):
        sizing.note(1.01 * SLOW_S)
    assert sizing.rows == USUAL_ROWS


def test_a_request_that_failed_makes_it_wary() -> None:
    """As much as usual is asked about, and for more the answers have to be fast for longer; several failed at once."""
    sizing = Sizing()
    for _ in range(2 * STEADY):
        sizing.note(FAST_S)
    sizing.fail()
    sizing.fail()
    assert sizing.rows == USUAL_ROWS
    for _ in range(WARIER * STEADY):
        assert sizing.rows == USUAL_ROWS
        sizing.note(FAST_S)
    assert sizing.rows == 2 * USUAL_ROWS


def test_answers_in_between_count_as_not_fast() -> None:
    """The answers have to be fast one after the other."""
    sizing = Sizing()
    for _ in range(2 * STEADY):
        sizing.note(FAST_S)
        sizing.note(1.01 * FAST_S)
    assert sizing.rows == USUAL_ROWS
