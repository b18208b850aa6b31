"""The past, cut into columns and drawn in a terminal and as a picture."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.autoscale.jobs import past

from edl_runtime.autoscale.history import HOLDS_S, ResourceUse
from edl_runtime.errors import SpecError
from edl_runtime.monitor import png
from edl_runtime.monitor.terminal import draw_history
from edl_runtime.monitor.timeline import Cell, StateSpan, columns, jobs_of, segments_of, spans, state_of

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
    by_day: dict[str, Any] = {"window": "day", "cpu": ResourceUse(total=12.0, reserved=6.0, ours=4.0, allowed=5.0)}
    by_night: dict[str, Any] = {
        "window": "night",
        "cpu": ResourceUse(total=12.0, reserved=10.0, ours=8.0, allowed=11.0),
    }
    points = [
        past(NOON, example=4, late="pending", **by_day),
        past(NOON + 720, example=4, late="pending", **by_day),
        past(NOON + 1440, example=4, late="pending", **by_day),
        past(NOON + 1800, example=2, late=8, **by_night),
        past(NOON + 2520, example="suspended", late=8, **by_night),
        past(NOON + 3240, late=8, **by_night),
    ]
    drawn = draw_history(points, since=NOON, until=NOON + 3600, width=60).plain
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
        lines = draw_history(points, since=NOON, until=NOON + 1200, width=width).plain.splitlines()
        assert max(map(len, lines)) <= width
    assert draw_history(points, since=NOON, until=NOON + 1200, width=1).plain


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
    drawn = draw_history(
        [past(since, a=1)], since=since, until=since + length_s, width=100 if length_s < 8 * DAY_S else 72
    )
    assert axis in " ".join(drawn.plain.splitlines()[-2].split())


def test_a_point_holds_until_the_next() -> None:
    """One from before the time that is asked about holds from its beginning, and the last one to its end."""
    first, second = past(-5.0, a=1), past(20.0, a=2)
    found = segments_of([first, second], since=0.0, until=60.0)
    assert [(one.start, one.end, one.point) for one in found] == [(0.0, 20.0, first), (20.0, 60.0, second)]


def test_a_point_does_not_speak_for_a_time_in_which_nobody_looked() -> None:
    """It holds for a quarter of an hour at most, and what is older than that tells nothing."""
    points = [past(-HOLDS_S, a=1), past(10.0, a=1), past(10.0 + 3 * HOLDS_S, a=1)]
    found = segments_of(points, since=0.0, until=20.0 + 3 * HOLDS_S)
    assert [(one.start, one.end) for one in found] == [
        (10.0, 10.0 + HOLDS_S),
        (10.0 + 3 * HOLDS_S, 20.0 + 3 * HOLDS_S),
    ]


def test_spans_join_what_stays_the_same() -> None:
    """Not across a time in which nobody looked, and not where there was nothing."""
    later = 3 * HOLDS_S
    points = [past(0.0, a="pending"), past(9.0, a="pending", b=1), past(12.0, a=3), past(20.0), past(later, a=1)]
    found = spans(segments_of(points, since=0.0, until=later + 1), state_of("a"))
    assert found == [
        StateSpan(0.0, 12.0, "pending"),
        StateSpan(12.0, 20.0, "running"),
        StateSpan(later, later + 1, "running"),
    ]


def test_jobs_stand_in_the_order_in_which_they_came() -> None:
    """By name where they came together."""
    points = [past(0.0, c=1, b=1), past(1.0, a=1, b=1)]
    assert jobs_of(segments_of(points, since=0.0, until=2.0)) == ["b", "c", "a"]


def test_a_column_is_the_mean_of_its_time() -> None:
    """A job's state, and the window, are those of the longest part."""
    use = ResourceUse(total=10.0, reserved=6.0, ours=4.0, allowed=8.0)
    points = [
        past(0.0, a=2, window="day", cpu=use),
        past(8.0, a=7, window="night", cpu=ResourceUse(total=10.0, reserved=1.0)),
        past(20.0, a="pending", window="night"),
        past(21.0, a=4),
    ]
    cut = columns(segments_of(points, since=0.0, until=40.0), since=0.0, until=40.0, count=4)
    assert cut.cells == {"a": [Cell(3.0, "running"), Cell(7.0, "running"), Cell(3.6, "running"), Cell(4.0, "running")]}
    assert cut.windows == ["day", "night", "", ""]
    assert cut.use["cpu"][:3] == [
        ResourceUse(total=10.0, reserved=5.0, ours=3.2, allowed=8.0),
        ResourceUse(total=10.0, reserved=1.0),
        None,
    ]


def test_a_column_in_which_nobody_looked_is_empty() -> None:
    """So is one before a job was there."""
    points = [past(0.0), past(2 * HOLDS_S, a="suspended")]
    cut = columns(segments_of(points, since=0.0, until=3 * HOLDS_S), since=0.0, until=3 * HOLDS_S, count=3)
    assert cut.cells == {"a": [None, None, Cell(0.0, "suspended")]}


def pixels(file: Path) -> Any:
    """Return the picture's colours, 0 to 255."""
    from matplotlib.image import imread

    return (imread(file)[:, :, :3] * 255).round().astype(int)


def share(picture: Any, colour: str) -> float:
    """Return how much of the picture is of a colour, or nearly."""
    wanted = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    return float(np.mean(np.abs(picture - wanted).max(axis=2) <= 3))


@pytest.mark.slow
def test_ten_jobs_of_a_day(tmp_path: Path) -> None:
    """Each has its colour, what waited its red, and the rest is light; it is as large as a page."""
    use = {
        hour: ResourceUse(total=64.0, reserved=40.0, ours=30.0, allowed=50.0 if hour < 12 else 20.0)
        for hour in range(24)
    }
    points = [
        past(
            600.0 * number,
            window="night" if number < 72 else "day",
            cpu=use[number // 6],
            late="pending" if number < 60 else 3,
            **{f"job{index}": 1 + (number // 10 + index) % 4 for index in range(9)},
        )
        for number in range(144)
    ]
    file = tmp_path / "past.png"
    png.save(points, file, since=0.0, until=DAY_S)
    picture = pixels(file)
    height, width, _ = picture.shape
    assert (width, 700 < height < 1500) == (1440, True)
    assert share(picture, "#ffffff") > 0.3
    assert [colour for colour in png.COLOURS if share(picture, colour) < 0.005] == []
    assert share(picture, png.RED) > 0.002
    assert share(picture, png.GREY) > 0.01


def test_without_jobs_it_is_still_a_picture(tmp_path: Path) -> None:
    """Axes and nothing else, as when nobody looked; also with a cluster of which nothing is known."""
    for points in ([], [past(0.0)]):
        png.save(points, tmp_path / "past.png", since=0.0, until=3600.0)
        assert share(pixels(tmp_path / "past.png"), "#ffffff") > 0.9


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is an extra, so that pods need none of it."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(SpecError, match=r"edl-airflow\[plot\]"):
        png.save([], tmp_path / "past.png", since=0.0, until=1.0)


def test_a_file_that_cant_be_written_is_named(tmp_path: Path) -> None:
    """With what is wrong with it."""
    with pytest.raises(SpecError, match=r"--png: got .*absent.*No such file"):
        png.save([], tmp_path / "absent" / "past.png", since=0.0, until=1.0)
