"""The past in a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.autoscale.history import past

from edl_runtime.autoscale.history import Use
from edl_runtime.monitor.drawing import draw

NOON = 1_750_000_000 // 86400 * 86400.0 + 43200
"""Of some day."""


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine in UTC."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_an_hour_as_it_was() -> None:
    """Windows, the share that is reserved with the line of what training may use, a row for each job, and the time."""
    by_day: dict[str, Any] = {"window": "day", "cpu": Use(total=12.0, reserved=6.0, ours=4.0, allowed=5.0)}
    by_night: dict[str, Any] = {"window": "night", "cpu": Use(total=12.0, reserved=10.0, ours=8.0, allowed=11.0)}
    points = [
        past(NOON, example=4, late="pending", **by_day),
        past(NOON + 720, example=4, late="pending", **by_day),
        past(NOON + 1440, example=4, late="pending", **by_day),
        past(NOON + 1800, example=2, late=8, **by_night),
        past(NOON + 2520, example="suspended", late=8, **by_night),
        past(NOON + 3240, late=8, **by_night),
    ]
    drawn = draw(points, since=NOON, until=NOON + 3600, width=60).plain
    assert drawn.splitlines() == [
        "window        ├day────────────────├night──────────────",
        "     cpu 100%│                    ━━━━━━━━━━━━━━━━━━━━",
        "             │                    ░░░░░░░░░░░░░░░░░░░░",
        "             │                    ████████████████████",
        "             │━━━━━━━━━━━━━━━━━━━━████████████████████",
        "             │████████████████████████████████████████",
        "           0%│████████████████████████████████████████",
        "example     4│████████████████████▄▄▄▄▄▄▄▄zzzzzzzz",
        "late        8│••••••••••••••••••••████████████████████    8",
        "              ┴───────────────────┴───────────────────",
        "              12:00               12:30",
        "█ jobs and pools   ░ others   ━ capacity for training   • pending   z suspended",
    ]


def test_lines_fit_the_terminal() -> None:
    """Unless that is narrower than anything can be drawn in."""
    points = [past(NOON, **{"a-name-of-some-length": 3}), past(NOON + 600, **{"a-name-of-some-length": 100})]
    for width in (60, 80, 200):
        lines = draw(points, since=NOON, until=NOON + 1200, width=width).plain.splitlines()
        assert max(map(len, lines)) <= width
    assert draw(points, since=NOON, until=NOON + 1200, width=1).plain


def test_a_week_has_days_on_its_axis() -> None:
    """Hours alone would not tell which day it was."""
    points = [past(NOON + 600 * number, a=1) for number in range(6 * 24 * 7)]
    drawn = draw(points, since=NOON, until=NOON + 7 * 86400, width=120).plain
    assert "Mon 00:00" in drawn


def test_a_month_has_dates_on_its_axis() -> None:
    """Days of the week would come again."""
    drawn = draw([past(NOON, a=1)], since=NOON - 30 * 86400, until=NOON, width=72).plain
    assert " ".join(drawn.splitlines()[-2].split()) == "23 May 30 May 06 Jun 13 Jun"


def test_a_minute_has_seconds_on_its_axis() -> None:
    """As when one looks at what has just begun."""
    drawn = draw([past(NOON, a=1)], since=NOON, until=NOON + 60, width=100).plain
    assert drawn.splitlines()[-2].split() == [f"12:00:{second:02d}" for second in range(0, 60, 10)]
