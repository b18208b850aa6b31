"""Runs of a TrafficWindowTimetable, for any windows around the clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.timetables.base import TimeRestriction
from hypothesis import given
from hypothesis import strategies as st

from edl_airflow.timetables.traffic_window import TrafficWindowTimetable
from edl_runtime.autoscale.traffic.windows import format_clock


@given(
    st.lists(st.integers(0, 1439), min_size=2, max_size=5, unique=True).map(sorted),
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]),
    st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 31)).map(lambda naive: naive.replace(tzinfo=UTC)),  # noqa: DTZ001
    st.booleans(),
)
def test_runs_follow_one_another(cuts: list[int], zone: str, start: datetime, all_have_runs: bool) -> None:  # noqa: FBT001
    """Each begins where the last one ended; or, of some windows alone, never before that."""
    spans = zip(cuts, [*cuts[1:], cuts[0]], strict=True)
    windows = [
        {"name": str(begin), "start": format_clock(begin), "end": format_clock(end), "sizes": {}}
        for begin, end in spans
    ]
    only = None if all_have_runs else str(cuts[0])
    timetable = TrafficWindowTimetable({"windows": windows, "time_zone": zone}, only=only)
    restriction: Any = TimeRestriction(start, None, catchup=True)  # type: ignore[arg-type]
    last = None
    for _ in range(4):
        info = timetable.next_dagrun_info(last_automated_data_interval=last, restriction=restriction)
        assert info
        assert info.data_interval
        interval = info.data_interval
        assert start <= interval.start < interval.end
        assert last is None or interval.start >= last.end
        assert last is None or only or interval.start == last.end
        assert timetable.infer_manual_data_interval(run_after=interval.end - timedelta(seconds=1)) == interval
        last = interval
