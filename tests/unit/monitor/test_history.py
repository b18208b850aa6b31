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
from edl_runtime.monitor import timeline
from edl_runtime.monitor.timeline import StateSpan, history_rows, jobs_of, segments_of, spans, state_of

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
    assert history_rows(points, since=NOON, until=NOON + 3600) == [
        ("2025-06-15 12:00:00", "day", "50.00%", "-", "example:4|late:pending"),
        ("2025-06-15 12:30:00", "night", "83.33%", "-", "example:2|late:8"),
        ("2025-06-15 12:42:00", "night", "83.33%", "-", "example:suspended|late:8"),
        ("2025-06-15 12:54:00", "night", "83.33%", "-", "late:8"),
    ]


def test_rows_say_where_nobody_looked() -> None:
    """Before the first point, and where one is too old to hold."""
    points = [past(NOON + 60, a=1), past(NOON + 60 + 2 * HOLDS_S, a=1)]
    rows = history_rows(points, since=NOON, until=NOON + 2 * HOLDS_S + 90)
    assert [(time[-8:], jobs) for time, *_, jobs in rows] == [
        ("12:00:00", "(not observed)"),
        ("12:01:00", "a:1"),
        ("12:16:00", "(not observed)"),
        ("12:31:00", "a:1"),
    ]


def test_a_point_holds_until_the_next() -> None:
    """One from before the time that is asked about holds from its beginning, and the last one to its end."""
    first, second = past(-5.0, a=1), past(20.0, a=2)
    found = segments_of([first, second], since=0.0, until=60.0)
    assert [(one.start, one.end, one.point) for one in found] == [(0.0, 20.0, first), (20.0, 60.0, second)]


def test_a_point_does_not_speak_for_a_time_in_which_nobody_looked() -> None:
    """It holds for a quarter of an hour at most, and an older one is not used."""
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
    timeline.save_png(points, file, since=0.0, until=DAY_S)
    picture = pixels(file)
    height, width, _ = picture.shape
    assert (width, 700 < height < 1500) == (1440, True)
    assert share(picture, "#ffffff") > 0.3
    assert [colour for colour in timeline.COLOURS if share(picture, colour) < 0.005] == []
    assert share(picture, timeline.RED) > 0.002
    assert share(picture, timeline.GREY) > 0.01


def test_without_jobs_it_is_still_a_picture(tmp_path: Path) -> None:
    """Axes and nothing else, as when nobody looked; also with a cluster of which nothing is known."""
    for points in ([], [past(0.0)]):
        timeline.save_png(points, tmp_path / "past.png", since=0.0, until=3600.0)
        assert share(pixels(tmp_path / "past.png"), "#ffffff") > 0.9


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is an extra, so that pods need none of it."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(SpecError, match=r"edl-airflow\[plot\]"):
        timeline.save_png([], tmp_path / "past.png", since=0.0, until=1.0)


def test_a_file_that_cant_be_written_is_named(tmp_path: Path) -> None:
    """With what is wrong with it."""
    with pytest.raises(SpecError, match=r"--png: got .*absent.*No such file"):
        timeline.save_png([], tmp_path / "absent" / "past.png", since=0.0, until=1.0)
