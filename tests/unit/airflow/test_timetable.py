"""When a TrafficWindowTimetable has runs, without a scheduler."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from airflow.sdk import DAG, Asset, AssetOrTimeSchedule
from airflow.serialization.serialized_objects import DagSerialization
from airflow.timetables.base import DataInterval, TimeRestriction, Timetable

from edl_airflow.plugin import EdlPlugin
from edl_airflow.timetables.traffic_window import TrafficWindowTimetable
from edl_runtime.autoscale.traffic.windows import TrafficWindows
from edl_runtime.errors import SpecError

NIGHTS: dict[str, Any] = {
    "time_zone": "Europe/Berlin",  # an hour ahead in winter, two in summer
    "windows": [
        {"name": "day", "start": "07:00", "end": "22:00", "sizes": {"cluster": {"gpu": 4}}},
        {"name": "night", "start": "22:00", "end": "07:00", "sizes": {}},
    ],
}
ALWAYS: dict[str, Any] = {"windows": [{"name": "all", "start": "00:00", "end": "24:00", "sizes": {}}]}
OFFICE: dict[str, Any] = {
    "windows": [{"name": "office", "start": "08:00", "end": "18:00", "days": "weekdays", "sizes": {"cluster": "40%"}}],
    "default": {},
    "holidays": ["2026-12-25"],
}
SHORT: dict[str, Any] = {
    "time_zone": "Europe/Berlin",
    "default": {},
    "windows": [{"name": "short", "start": "02:15", "end": "02:45", "sizes": {}}],
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the time."""

    def is_at(text: str) -> None:
        monkeypatch.setattr("edl_airflow.timetables.traffic_window._now", lambda: moment(text))

    return is_at


def moment(text: str) -> Any:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def runs(
    timetable: Timetable, count: int, *, catchup: bool = False, earliest: str = "", latest: str = "", last: Any = None
) -> list[tuple[str, str]]:
    """The next runs, each asked for with the one before as the last: start and end of the intervals."""
    restriction = TimeRestriction(moment(earliest) if earliest else None, moment(latest) if latest else None, catchup)
    found = []
    for _ in range(count):
        info = timetable.next_dagrun_info(last_automated_data_interval=last, restriction=restriction)
        if info is None:
            break
        last = info.data_interval
        assert last
        assert info.run_after == last.start
        found.append((f"{last.start:%m-%d %H:%M}", f"{last.end:%m-%d %H:%M}"))
    return found


@pytest.mark.parametrize(
    ("windows", "only", "now", "expected"),
    [
        (NIGHTS, None, "01-01 12:00", "01-01 06:00 to 21:00, 01-01 21:00 to 06:00, 01-02 06:00 to 21:00"),
        (NIGHTS, "night", "01-01 12:00", "01-01 21:00 to 06:00, 01-02 21:00 to 06:00"),
        (NIGHTS, "night", "01-01 22:00", "01-01 21:00 to 06:00"),
        (OFFICE, "default", "01-02 12:00", "01-02 18:00 to 08:00, 01-05 18:00 to 08:00"),  # a friday
        (OFFICE, None, "12-24 12:00", "12-24 08:00 to 18:00, 12-24 18:00 to 08:00, 12-28 08:00 to 18:00"),
        (NIGHTS, None, "03-28 20:00", "03-28 06:00 to 21:00, 03-28 21:00 to 05:00"),  # a night of 8 hours
        (NIGHTS, None, "10-24 19:00", "10-24 05:00 to 20:00, 10-24 20:00 to 06:00"),  # one of 10
        (SHORT, "short", "10-24 12:00", "10-25 00:15 to 00:45, 10-25 01:15 to 01:45, 10-26 01:15 to 01:45"),
        (SHORT, "short", "03-28 12:00", "03-30 00:15 to 00:45"),
    ],
    ids=[
        "each edge, from the window that holds on",
        "some windows, from the next one on",
        "some windows, from the one that holds on",
        "all other times, by their name",
        "a holiday has the windows of holidays alone: here none",
        "the clock on the wall goes forth",
        "the clock on the wall goes back",
        "in the hour that comes twice",
        "in the hour that is left out",
    ],
)
def test_runs_are_at_edges_and_their_intervals_are_the_windows(
    clock: Any, windows: dict[str, Any], only: str | None, now: str, expected: str
) -> None:
    """None twice, none overlapping."""
    clock(f"2026-{now}")
    count = expected.count(",") + 1
    found = runs(TrafficWindowTimetable(windows, only=only), count)
    assert ", ".join(f"{start} to {end[-5:]}" for start, end in found) == expected


def starts(timetable: Timetable, count: int, **given: Any) -> list[str]:
    return [start for start, _ in runs(timetable, count, **given)]


def interval(start: str, end: str) -> DataInterval:
    return DataInterval(moment(start), moment(end))


LONG_AGO = interval("2026-01-01 06:00", "2026-01-01 21:00")
JUST_NOW = interval("2026-01-05 06:00", "2026-01-05 21:00")


@pytest.mark.parametrize(
    ("now", "given", "found"),
    [
        ("01-05 12:00", {"last": None}, "01-05 21:00"),
        ("01-05 06:00", {"last": None}, "01-05 06:00"),
        ("01-05 06:00:59", {"last": None}, "01-05 06:00"),
        ("01-05 12:00", {"last": LONG_AGO}, "01-05 06:00"),
    ],
    ids=["the next one", "one that begins now", "one that began this very minute", "a DAG that ran before"],
)
def test_a_dag_can_wait_for_its_next_window(clock: Any, now: str, given: Any, found: str) -> None:
    """One that ran before makes up for what holds."""
    clock(f"2026-{now}")
    assert starts(TrafficWindowTimetable(NIGHTS, run_immediately=False), 1, **given) == [found]


SINCE: dict[str, Any] = {"earliest": "2026-01-01 06:00", "latest": "2026-01-02 06:00"}


@pytest.mark.parametrize(
    ("given", "count", "found"),
    [
        ({**SINCE, "catchup": True}, 9, ["01-01 06:00", "01-01 21:00", "01-02 06:00"]),
        ({"earliest": "2026-01-01 06:01", "catchup": True}, 1, ["01-01 21:00"]),
        ({"catchup": True}, 1, ["01-05 06:00"]),
        (SINCE, 9, []),
        ({"earliest": "2026-01-01 06:00"}, 2, ["01-05 06:00", "01-05 21:00"]),
        ({"earliest": "2026-01-06 00:00"}, 1, ["01-06 06:00"]),
        ({"last": LONG_AGO}, 2, ["01-05 06:00", "01-05 21:00"]),
        ({"last": JUST_NOW}, 1, ["01-05 21:00"]),
    ],
    ids=[
        "all since the start",
        "all since the first that began after it",
        "all of a DAG without a start",
        "none once it has ended",
        "the one that holds alone without catchup",
        "the first of a DAG that has yet to start",
        "one of what holds for a DAG that was switched off",
        "none where that has had its run",
    ],
)
def test_what_is_made_up_for(clock: Any, given: dict[str, Any], count: int, found: list[str]) -> None:
    """On the fifth at noon."""
    clock("2026-01-05 12:00")
    assert starts(TrafficWindowTimetable(NIGHTS), count, **given) == found


def test_when_windows_are_changed_the_one_that_holds_now_has_a_run(clock: Any) -> None:
    """Unless it began with, or before, the last run."""
    clock("2026-01-05 12:00")
    assert starts(TrafficWindowTimetable(OFFICE), 2, last=JUST_NOW) == ["01-05 08:00", "01-05 18:00"]


@pytest.mark.parametrize(
    ("windows", "only"),
    [
        (ALWAYS, None),
        ({"windows": [], "default": {}}, None),
        ({**OFFICE, "windows": [{**OFFICE["windows"][0], "days": "holiday"}], "holidays": []}, "office"),
    ],
)
def test_windows_that_never_begin_are_refused_when_the_dag_is_read(windows: dict[str, Any], only: str | None) -> None:
    """There would be no runs, and no error; what is there already, as in a scheduler, has none."""
    timetable = TrafficWindowTimetable(windows, only=only)
    with pytest.raises(SpecError, match="begins within 400 days"):
        timetable.validate()
    assert runs(timetable, 1) == []
    TrafficWindowTimetable(NIGHTS).validate()


def test_a_year_of_no_such_window_is_soon_over(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler asks for all its DAGs in turn: each edge of the year, two a day, is looked at once."""
    clock("2026-12-26 12:00")
    xmas = {"name": "xmas", "start": "08:00", "end": "20:00", "days": "holiday", "sizes": {}}
    timetable = TrafficWindowTimetable({**OFFICE, "windows": [*OFFICE["windows"], xmas]}, only="xmas")
    at, looks = TrafficWindows.at, list[datetime]()
    monkeypatch.setattr(TrafficWindows, "at", lambda self, moment: (looks.append(moment), at(self, moment))[1])
    assert runs(timetable, 1) == []
    assert 400 < len(looks) <= 802


def test_a_run_by_hand_of_a_date_gets_the_window_of_then() -> None:
    """One without a date gets none."""
    noon = moment("2026-01-01 12:00")
    assert TrafficWindowTimetable(NIGHTS, only="night").infer_manual_data_interval(run_after=noon) == LONG_AGO
    always = TrafficWindowTimetable(ALWAYS).infer_manual_data_interval(run_after=noon)
    assert always == DataInterval(noon, noon + timedelta(days=400))


def test_it_says_what_it_does() -> None:
    """Times, zone and sizes, in the UI's list of DAGs and beside it; no longer than Airflow's database has room for."""
    timetable = TrafficWindowTimetable(NIGHTS)
    assert timetable.summary == "at 07:00, 22:00 Europe/Berlin: day (at most 4 gpu), night (all)"
    assert timetable.description == (
        "A run when each window begins, for as long as it holds. day: 07:00 to 22:00, at most 4 gpu; "
        "night: 22:00 to 07:00, all. Clocks of Europe/Berlin."
    )
    nights = TrafficWindowTimetable(NIGHTS, only="night")
    assert nights.summary == "at 22:00 Europe/Berlin: night (all)"
    assert nights.description.startswith("A run when night begins, for as long as it holds.")
    office = TrafficWindowTimetable(OFFICE)
    assert office.summary == "at 08:00, 18:00 UTC: office (at most 40% of all), default (all)"
    assert (
        "office: 08:00 to 18:00 on mon to fri, at most 40% of all; default: all other times, all" in office.description
    )
    assert office.description.endswith("Clocks of UTC, holidays: 1.")
    many = [{"name": f"w{hour}", "start": f"{hour}:00", "end": f"{hour + 1}:00", "sizes": {}} for hour in range(24)]
    assert len(TrafficWindowTimetable({"windows": many}).description) <= 900


@pytest.mark.parametrize(
    ("windows", "only", "mistake"),
    [
        (NIGHTS, "nihgt", "only: got 'nihgt', allowed is one of 'day', 'night'"),
        (NIGHTS, ("night", "default"), "only: got 'default', allowed is one of 'day', 'night'"),
        (NIGHTS, (), "only: got ()"),
        ({**NIGHTS, "time_zone": "Mars/Phobos"}, None, "windows, time_zone: got 'Mars/Phobos'"),
    ],
)
def test_mistakes_are_found_when_the_dag_is_read(windows: Any, only: Any, mistake: str) -> None:
    """Each in words."""
    with pytest.raises(SpecError) as caught:
        TrafficWindowTimetable(windows, only)
    assert str(caught.value).startswith(mistake)


def test_airflow_keeps_it_with_the_dag(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back has the same runs and words; a Variable is as it was when the file was read."""
    assert EdlPlugin.timetables == [TrafficWindowTimetable]
    monkeypatch.setenv("AIRFLOW_VAR_NIGHTS", json.dumps(NIGHTS))
    timetable = TrafficWindowTimetable("variable:nights", only="night", run_immediately=False)
    monkeypatch.delenv("AIRFLOW_VAR_NIGHTS")
    kept = json.loads(json.dumps(DagSerialization.to_dict(DAG("nights", schedule=timetable))))
    found = DagSerialization.from_dict(kept).timetable
    assert isinstance(found, TrafficWindowTimetable)
    assert (found.serialize(), found.summary) == (timetable.serialize(), timetable.summary)
    assert (found.windows, found.only, found.run_immediately) == (timetable.windows, ("night",), False)


def test_it_can_stand_beside_assets() -> None:
    """In an AssetOrTimeSchedule, whose words hold ours."""
    timetable: Any = TrafficWindowTimetable(NIGHTS)  # Airflow takes more than it says
    both = AssetOrTimeSchedule(timetable=timetable, assets=[Asset("submitted")])
    found = DagSerialization.from_dict(DagSerialization.to_dict(DAG("nights", schedule=both))).timetable
    assert found.summary.endswith(TrafficWindowTimetable(NIGHTS).summary)
    assert len(found.description) <= 1000
