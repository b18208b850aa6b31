"""Who is the limit, from numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edl_runtime.distill.limit import GAP_S, SETTLED_S, UNANSWERED_S, Limit, Settling, limit_now
from edl_runtime.distill.pace import Pace
from edl_runtime.distill.stats import ReaderStats

NUMBERS: list[tuple[Limit, dict[str, Any]]] = [
    ("teachers", {"waiting": 0.38, "busy": 1.0}),
    ("teachers", {"waiting": 0.38, "waiting_for_source": 0.1, "busy": 1.0}),
    ("teachers", {"waiting": 1.0, "busy": 1.0}),
    ("source", {"waiting": 0.38, "waiting_for_source": 0.3}),
    ("source", {"waiting": 1.0, "waiting_for_source": 1.0, "trains": False}),
    ("student", {"waiting": 0.0, "busy": 0.2}),
    ("student", {"waiting": 0.01, "waiting_for_source": 0.01, "busy": 0.2}),
    ("student", {"waiting": 0.02, "busy": 0.75}),
    ("balanced", {"waiting": 0.0, "busy": 0.8}),
    ("balanced", {"waiting": 0.05, "busy": 0.2}),
    ("balanced", {"waiting": 0.05, "waiting_for_source": 0.05, "busy": 0.2}),
    ("no_answer", {"waiting": 1.0, "trains": False}),
    ("", {"waiting": 0.5, "trains": False}),
    ("", {"waiting": 0.0, "trains": False}),
]


@pytest.mark.parametrize(("limit", "numbers"), NUMBERS)
def test_the_numbers_say_who_is_the_limit(limit: Limit, numbers: dict[str, Any]) -> None:
    """Whoever would have to be faster for the training to be."""
    given = {"trains": True, "waiting_for_source": 0.0, "busy": 0.0, **numbers}
    assert limit_now(**given) == limit


def _seconds(seen: Limit, count: float, at: Iterator[int], settling: Settling) -> list[Limit]:
    return [settling.look(seen, float(next(at))) for _ in range(round(count))]


def test_a_limit_counts_once_it_has_held() -> None:
    """One stall, whose traces stay for a window, is no news, and neither is a long step."""
    settling, at = Settling(), iter(range(10**6))
    assert _seconds("teachers", SETTLED_S, at, settling) == [""] * round(SETTLED_S)
    assert _seconds("teachers", 1, at, settling) == ["teachers"]
    assert set(_seconds("student", SETTLED_S, at, settling)) == {"teachers"}
    assert set(_seconds("teachers", 1, at, settling)) == {"teachers"}
    assert set(_seconds("", GAP_S - 1, at, settling)) == {"teachers"}
    assert set(_seconds("teachers", 1, at, settling)) == {"teachers"}
    assert _seconds("", GAP_S + SETTLED_S, at, settling)[-1] == ""


def test_a_limit_that_toggles_is_never_settled() -> None:
    """Numbers around a threshold say nothing, rather than one thing and then the other."""
    settling, at = Settling(), iter(range(10**6))
    for _ in range(20):
        assert set(_seconds("balanced", 5, at, settling) + _seconds("teachers", 5, at, settling)) == {""}


def test_that_no_teacher_answers_is_said_sooner_and_not_kept() -> None:
    """When one does, that is seen at the next look."""
    settling, at = Settling(), iter(range(10**6))
    assert _seconds("no_answer", UNANSWERED_S + 1, at, settling)[-1] == "no_answer"
    assert _seconds("teachers", 1, at, settling) == [""]
    assert _seconds("no_answer", UNANSWERED_S + 1, at, settling)[-1] == "no_answer"
    assert _seconds("", 1, at, settling) == [""]


def test_shares_and_rates_are_those_of_the_last_seconds() -> None:
    """A teacher that comes late and does most of the work is seen to, and one that is gone is not."""
    pace, answered = Pace(100.0), {"early": 0, "both": 0}
    for second in range(1, 31):
        answered["both"] += 1
        if second <= 15:
            answered["early"] += 9
        else:
            answered["late"] = answered.get("late", 0) + 3
        reading = ReaderStats(
            batches=second, teachers=2, busy=1, answered=dict(answered), waited_s=second / 2, waited_for_source_s=0
        )
        rates = pace.look(steps=2 * second, samples=32 * second, reading=reading, now=100.0 + second)
        if second == 15:
            assert rates.shares == pytest.approx({"early": 0.9, "both": 0.1})
    assert rates.shares == pytest.approx({"late": 0.75, "both": 0.25})
    assert (rates.steps_per_s, rates.samples_per_s) == pytest.approx((2, 32))
    assert (rates.waiting, rates.busy) == pytest.approx((0.5, 0.5))
    assert rates.limit == "teachers"


def test_a_phase_without_a_reader_has_no_limit() -> None:
    """Steps that no teacher has a part in say nothing of teachers."""
    pace = Pace(0.0)
    rates = [pace.look(steps=s, samples=s, reading=ReaderStats(), now=float(s)) for s in range(1, 120)]
    assert {each.limit for each in rates} == {""}
    assert rates[-1].steps_per_s == pytest.approx(1)
