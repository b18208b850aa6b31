"""Traffic windows as DAGs are given them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from edl_airflow.windows import (
    as_data,
    as_field,
    as_windows,
    check_window,
    days_in_words,
    left_to_training,
    sizes_in_words,
    window_now,
    window_of,
)
from edl_runtime.autoscale.traffic import DAYS, Span
from edl_runtime.autoscale.traffic_schema import to_windows
from edl_runtime.backends.base import Capacity, NodeCapacity
from edl_runtime.errors import SpecError

TEXT = """\
time_zone: Europe/Berlin
windows:
  - name: day
    start: 07:00
    end: 22:00
    sizes: {cluster: {gpu: 4}, jobs: {nightly: 25%}}
  - name: night
    start: 22:00
    end: 07:00
    sizes: {}
"""
WINDOWS = as_windows(TEXT)
NIGHT = {
    "data_interval_start": datetime(2026, 1, 1, 21, tzinfo=UTC),
    "data_interval_end": datetime(2026, 1, 2, 6, tzinfo=UTC),
}


def test_windows_are_the_same_however_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As themselves, a mapping, a text, a file or a Variable of YAML or JSON."""
    (tmp_path / "w.yaml").write_text(TEXT)
    monkeypatch.setenv("AIRFLOW_VAR_TRAFFIC", TEXT)
    monkeypatch.setenv("AIRFLOW_VAR_JSON", '{"windows": [], "default": {}}')
    given: list[Any] = [WINDOWS, as_data(WINDOWS), tmp_path / "w.yaml", "variable:traffic"]
    assert [as_windows(each) for each in given] == [WINDOWS] * 4
    assert as_windows(Path("w.yaml"), folder=tmp_path) == WINDOWS
    assert as_windows("variable:json") == as_windows('{"windows": [], "default": {}}')


def test_a_relative_path_starts_from_the_file_that_calls(tmp_path: Path) -> None:
    """As a DAG's file, wherever Airflow was started."""
    (tmp_path / "w.yaml").write_text(TEXT)
    dag = compile('found = as_windows(Path("w.yaml"))', tmp_path / "dag.py", "exec")
    made: dict[str, Any] = {"as_windows": as_windows, "Path": Path}
    exec(dag, made)
    assert made["found"] == WINDOWS


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            TEXT.replace("22:00", "23:00", 1),
            "windows, line 7: windows[1]: got \"'day' and 'night' on mon from 22:00 to 23:00",
        ),
        (TEXT.replace("22:00", "21:00", 1), "windows, line 2: windows: got 'none on mon from 21:00 to 22:00'"),
        (TEXT.replace("Europe/Berlin", "Mars/Phobos"), "windows, line 1: time_zone: got 'Mars/Phobos'"),
        (TEXT.replace("25%", "250%"), "windows, line 6: windows[0].sizes.jobs.nightly: got '250%'"),
        ("nights", "windows: got 'nights', allowed is traffic windows as a mapping, a Path"),
        (7, "windows: got 7, allowed is traffic windows as a mapping, a Path"),
        ({"window": []}, "windows, window: got []"),
        (Path("/nowhere.yaml"), "windows, /nowhere.yaml, file: got"),
        ("variable:none", "windows, Variable 'none', name: got 'none', allowed is an Airflow Variable that there is"),
        ("variable:bad", "windows, Variable 'bad', line 2: windows: got 'all'"),
    ],
)
def test_mistakes_are_told_with_where_they_are(given: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file or Variable, the line, the field, what is given and what is allowed."""
    monkeypatch.setenv("AIRFLOW_VAR_BAD", "# mine\nwindows: all\n")
    with pytest.raises(SpecError) as caught:
        as_windows(given)
    assert str(caught.value).startswith(words)


def test_a_variable_is_left_for_the_run_and_all_else_is_read_with_the_dag(tmp_path: Path) -> None:
    """Mistakes are found early; the API server is asked for nothing when a DAG is read."""
    (tmp_path / "w.yaml").write_text(TEXT)
    for given in (WINDOWS, TEXT, as_data(WINDOWS), Path("w.yaml")):
        assert as_field(given, tmp_path) == as_data(WINDOWS)
    for later in ("variable:nobody_has_set", "{{ params.windows }}", {"time_zone": "{{ params.zone }}"}):
        assert as_field(later, tmp_path) == later
    with pytest.raises(SpecError, match="time_zone"):
        as_field({"time_zone": "Mars/Phobos"}, tmp_path)


SOURCES: list[dict[str, Any]] = [
    {"prometheus": {"url": "http://prometheus:9090", "query": "sum(x)"}},
    {"redis": {"stream": "web"}},
    {"csv": {"path": "/w"}},
]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("size", ["0%", "33.3%", 0, 2.5, "0.000001", 10**17, "0.0001%"])
def test_plain_data_is_the_same_windows(size: Any, source: dict[str, Any]) -> None:
    """Sizes of any magnitude, where traffic is known from, days and holidays, each time in the same order."""
    data = {
        "traffic": {"resource": "gpu", "times": 0.5, "headroom": 1.25, **source},
        "holidays": ["2026-12-26", "2026-12-25"],
        "windows": [{"name": "a", "start": "01:00", "end": "24:00", "days": ["sun", "holiday", "mon"], "sizes": {}}],
        "default": {"cluster": {"memory": size}},
    }
    windows = to_windows(data)
    assert to_windows(as_data(windows)) == windows
    assert as_data(windows)["holidays"] == ["2026-12-25", "2026-12-26"]
    assert as_data(windows)["windows"][0]["days"] == ["mon", "sun", "holiday"]


@pytest.mark.parametrize(
    ("context", "now", "name"),
    [
        (NIGHT, datetime(2026, 1, 1, 20, 59, 59, tzinfo=UTC), "night"),  # a worker's clock is late
        (NIGHT, datetime(2026, 1, 2, 5, 59, tzinfo=UTC), "night"),
        (NIGHT, datetime(2026, 1, 2, 6, 0, tzinfo=UTC), "day"),  # too late for it
        ({}, datetime(2026, 1, 2, 5, 59, tzinfo=UTC), "night"),
        ({"data_interval_start": None, "data_interval_end": None}, datetime(2026, 1, 2, 12, tzinfo=UTC), "day"),
        (dict.fromkeys(NIGHT, datetime(2026, 1, 1, 21, tzinfo=UTC)), datetime(2026, 1, 2, 12, tzinfo=UTC), "day"),
        (
            {**NIGHT, "data_interval_end": datetime(2026, 1, 3, 21, tzinfo=UTC)},  # of another schedule
            datetime(2026, 1, 2, 12, tzinfo=UTC),
            "day",
        ),
    ],
)
def test_a_task_finds_its_window(context: dict[str, Any], now: datetime, name: str) -> None:
    """That of its run; or what holds now where the run has none, or it is over."""
    span = window_of(WINDOWS, context, now)
    assert span.name == name
    assert name == "day" or span.start == NIGHT["data_interval_start"]


def test_a_window_is_returned_as_plain_data() -> None:
    """With its limits; a window without end has none."""
    found = window_now(WINDOWS.at(datetime(2026, 1, 2, 12, tzinfo=UTC)))
    sizes = {"cluster": {"gpu": 4}, "jobs": {"nightly": "25%"}}
    assert found == {
        "window": "day",
        "start": "2026-01-02T06:00:00+00:00",
        "end": "2026-01-02T21:00:00+00:00",
        "sizes": sizes,
    }
    always = Span(name="default", sizes=WINDOWS.windows[1].sizes, start=None, end=None)
    assert window_now(always) == {"window": "default", "start": None, "end": None, "sizes": {}}


def test_an_unknown_window_is_refused_with_the_known_ones() -> None:
    """The default is one where there is one."""
    with pytest.raises(SpecError, match=r"window: got 'nihgt', allowed is one of 'day', 'night'$"):
        check_window(WINDOWS, "nihgt")
    with pytest.raises(SpecError, match="only: got 3"):
        check_window(WINDOWS, 3, field="only")
    assert check_window(to_windows({"default": {"jobs": {"a": 1}}}), "default").jobs["a"].amount == 1


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, "all"),
        ({"cluster": "40%"}, "at most 40% of all"),
        ({"cluster": {"gpu": 4, "cpu": "50%"}}, "at most 50% of cpu and 4 gpu"),
        (
            {"cluster": {"gpu": 4, "*": "10%"}, "jobs": {"b": 2, "a": "20%"}},
            "at most 4 gpu and 10% of the rest, a at most 20%, b at most 2",
        ),
        ({"pools": {"p": 0}}, "p at most 0"),
    ],
)
def test_sizes_in_words(sizes: dict[str, Any], words: str) -> None:
    """For people."""
    assert sizes_in_words(to_windows({"default": sizes}).sizes_at(datetime.now(UTC))) == words


@pytest.mark.parametrize(
    ("days", "words"),
    [
        (DAYS, ""),
        (DAYS[:5], "mon to fri"),
        (("sat", "sun"), "sat, sun"),
        (("sun", "mon", "holiday"), "mon, sun, holiday"),
    ],
)
def test_days_in_words(days: tuple[str, ...], words: str) -> None:
    """Those in a row by the first and the last."""
    assert days_in_words(days) == words


def test_a_window_leaves_a_part_of_all_nodes_and_no_more_than_a_quota() -> None:
    """A quota takes nothing from what training may use of the cluster, but where it is less."""
    total = Capacity(
        nodes=tuple(NodeCapacity(name=name, total={"gpu": 4.0, "cpu": 8.0}, free={}) for name in "ab")
    ).total
    assert total == {"gpu": 8, "cpu": 16}
    half = to_windows({"default": {"cluster": "50%"}}).sizes_at(datetime.now(UTC))
    assert left_to_training(half, total, {}) == {"gpu": 4, "cpu": 8}
    assert left_to_training(half, total, {"gpu": 3.0, "cpu": 12.0}) == {"gpu": 3, "cpu": 8}
