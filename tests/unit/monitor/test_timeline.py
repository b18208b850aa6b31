"""The past, cut into columns."""

from __future__ import annotations

from support.autoscale.history import past

from edl_runtime.autoscale.history import HOLDS_S, Use
from edl_runtime.monitor.timeline import Cell, Span, columns, jobs_of, spans, state_of, stretches


def test_a_point_holds_until_the_next() -> None:
    """One from before the time that is asked about holds from its beginning, and the last one to its end."""
    first, second = past(-5.0, a=1), past(20.0, a=2)
    found = stretches([first, second], since=0.0, until=60.0)
    assert [(one.start, one.end, one.point) for one in found] == [(0.0, 20.0, first), (20.0, 60.0, second)]


def test_a_point_does_not_speak_for_a_time_in_which_nobody_looked() -> None:
    """It holds for a quarter of an hour at most, and what is older than that tells nothing."""
    points = [past(-HOLDS_S, a=1), past(10.0, a=1), past(10.0 + 3 * HOLDS_S, a=1)]
    found = stretches(points, since=0.0, until=20.0 + 3 * HOLDS_S)
    assert [(one.start, one.end) for one in found] == [
        (10.0, 10.0 + HOLDS_S),
        (10.0 + 3 * HOLDS_S, 20.0 + 3 * HOLDS_S),
    ]


def test_spans_join_what_stays_the_same() -> None:
    """Not across a time in which nobody looked, and not where there was nothing."""
    later = 3 * HOLDS_S
    points = [past(0.0, a="pending"), past(9.0, a="pending", b=1), past(12.0, a=3), past(20.0), past(later, a=1)]
    found = spans(stretches(points, since=0.0, until=later + 1), state_of("a"))
    assert found == [Span(0.0, 12.0, "pending"), Span(12.0, 20.0, "running"), Span(later, later + 1, "running")]


def test_jobs_stand_in_the_order_in_which_they_came() -> None:
    """By name where they came together."""
    points = [past(0.0, c=1, b=1), past(1.0, a=1, b=1)]
    assert jobs_of(stretches(points, since=0.0, until=2.0)) == ["b", "c", "a"]


def test_a_column_is_the_mean_of_its_time() -> None:
    """A job's state, and the window, are those of the longest part."""
    use = Use(total=10.0, reserved=6.0, ours=4.0, allowed=8.0)
    points = [
        past(0.0, a=2, window="day", cpu=use),
        past(8.0, a=7, window="night", cpu=Use(total=10.0, reserved=1.0)),
        past(20.0, a="pending", window="night"),
        past(21.0, a=4),
    ]
    cut = columns(stretches(points, since=0.0, until=40.0), since=0.0, until=40.0, count=4)
    assert cut.cells == {"a": [Cell(3.0, "running"), Cell(7.0, "running"), Cell(3.6, "running"), Cell(4.0, "running")]}
    assert cut.windows == ["day", "night", "", ""]
    assert cut.use["cpu"][:3] == [
        Use(total=10.0, reserved=5.0, ours=3.2, allowed=8.0),
        Use(total=10.0, reserved=1.0),
        None,
    ]


def test_a_column_in_which_nobody_looked_is_empty() -> None:
    """So is one before a job was there."""
    points = [past(0.0), past(2 * HOLDS_S, a="suspended")]
    cut = columns(stretches(points, since=0.0, until=3 * HOLDS_S), since=0.0, until=3 * HOLDS_S, count=3)
    assert cut.cells == {"a": [None, None, Cell(0.0, "suspended")]}
