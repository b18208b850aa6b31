"""The past in a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.autoscale.history import past

from edl_runtime.autoscale.history import Use
from edl_runtime.monitor.drawing import draw

DAY_S = 86400
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


@pytest.mark.parametrize(
    ("length_s", "axis"),
    [
        (60, "12:00:00 12:00:10 12:00:20 12:00:30 12:00:40 12:00:50"),
        (7 * DAY_S, "Tue 00:00 Thu 00:00 Sat 00:00"),  # hours alone would not tell which day it was
        (30 * DAY_S, "23 May 30 May 06 Jun 13 Jun"),  # days of the week would come again
    ],
)
def test_the_axis_has_times_of_which_each_comes_once(length_s: float, axis: str) -> None:
    """Seconds, hours with days, or dates."""
    since = NOON if length_s < DAY_S else NOON - length_s
    drawn = draw([past(since, a=1)], since=since, until=since + length_s, width=100 if length_s < 8 * DAY_S else 72)
    assert axis in " ".join(drawn.plain.splitlines()[-2].split())
