"""The past as a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.autoscale.jobs import past

from edl_runtime.autoscale.history import Use
from edl_runtime.errors import SpecError
from edl_runtime.monitor import png

DAY_S = 86400.0


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
    use = {hour: Use(total=64.0, reserved=40.0, ours=30.0, allowed=50.0 if hour < 12 else 20.0) for hour in range(24)}
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
