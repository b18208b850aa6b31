"""When a training has to end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from edl_airflow.ends import end_of
from edl_runtime.errors import SpecError

EVENING = datetime(2026, 1, 31, 22, 0, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")  # an hour ahead in winter, two in summer


@pytest.mark.parametrize(
    ("ends_by", "moment"),
    [
        ("07:00", datetime(2026, 2, 1, 7, 0, tzinfo=UTC)),
        ("7:00", datetime(2026, 2, 1, 7, 0, tzinfo=UTC)),
        ("23:30:15", datetime(2026, 1, 31, 23, 30, 15, tzinfo=UTC)),
        ("22:00", datetime(2026, 2, 1, 22, 0, tzinfo=UTC)),
        (timedelta(hours=9), datetime(2026, 2, 1, 7, 0, tzinfo=UTC)),
        ("PT9H", datetime(2026, 2, 1, 7, 0, tzinfo=UTC)),
        ("PT1M30S", datetime(2026, 1, 31, 22, 1, 30, tzinfo=UTC)),
        ("2026-02-01T07:00", datetime(2026, 2, 1, 7, 0, tzinfo=UTC)),
        ("2026-02-01T07:00+02:00", datetime(2026, 2, 1, 5, 0, tzinfo=UTC)),
        (datetime(2026, 2, 1, 7, 0, tzinfo=UTC), datetime(2026, 2, 1, 7, 0, tzinfo=UTC)),
        ("2026-01-01T00:00Z", datetime(2026, 1, 1, tzinfo=UTC)),
        ("2026-01-31 22:00:00.5+00:00", datetime(2026, 1, 31, 22, 0, 0, 500_000, tzinfo=UTC)),
    ],
)
def test_when_it_ends(ends_by: object, moment: datetime) -> None:
    """The next such time after the run has started, so long after that, or just then."""
    assert end_of(ends_by, start=EVENING) == moment


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (datetime(2026, 1, 31, 22, 0, tzinfo=UTC), datetime(2026, 2, 1, 6, 0, tzinfo=UTC)),
        (datetime(2026, 2, 1, 5, 59, tzinfo=UTC), datetime(2026, 2, 1, 6, 0, tzinfo=UTC)),
        (datetime(2026, 3, 28, 21, 0, tzinfo=UTC), datetime(2026, 3, 29, 5, 0, tzinfo=UTC)),  # the night of 23 hours
        (datetime(2026, 10, 24, 20, 0, tzinfo=UTC), datetime(2026, 10, 25, 6, 0, tzinfo=UTC)),  # the one of 25
    ],
)
def test_a_time_of_day_is_one_of_the_dags_zone(start: datetime, end: datetime) -> None:
    """Also in the nights when clocks change."""
    assert end_of("07:00", start=start, zone=BERLIN) == end
    assert end_of(end.astimezone(BERLIN).strftime("%Y-%m-%dT%H:%M"), start=start, zone=BERLIN) == end


@pytest.mark.parametrize(
    ("start", "ends_by", "end"),
    [
        ("2026-10-25T01:20Z", "02:45", "2026-10-25T01:45Z"),  # 02:20 for the second time
        ("2026-10-25T00:50Z", "02:10", "2026-10-25T01:10Z"),  # 02:50 for the first time
        ("2026-10-24T22:00Z", "02:10", "2026-10-25T00:10Z"),
        ("2026-10-25T01:10Z", "02:10", "2026-10-26T01:10Z"),
        ("2026-03-28T22:00Z", "02:30", "2026-03-29T01:30Z"),  # is 03:30, for there is no 02:30
    ],
)
def test_a_time_of_day_in_the_hour_that_comes_twice_or_not_at_all(start: str, ends_by: str, end: str) -> None:
    """It is the first such moment after the start, never one before it."""
    begins, ends = datetime.fromisoformat(start), datetime.fromisoformat(end)
    assert end_of(ends_by, start=begins, zone=BERLIN) == ends


def test_a_time_of_day_counts_from_when_the_run_was_to_start() -> None:
    """So it has passed for one that starts too late; a duration begins with the run."""
    morning = datetime(2026, 2, 1, 7, 0, 5, tzinfo=UTC)
    assert end_of("07:00", start=morning, due=EVENING) == datetime(2026, 2, 1, 7, 0, tzinfo=UTC)
    assert end_of("PT9H", start=morning, due=EVENING) == morning + timedelta(hours=9)


MISTAKES = [
    "",
    "soon",
    "25:00",
    "7",
    timedelta(0),
    "PT0S",
    "PT",
    7,
    None,
    "20260101",
    "2026-W01",
    "2026-01-31",
    "20260131T0700",
]


@pytest.mark.parametrize("ends_by", MISTAKES)
def test_what_means_no_moment_is_refused(ends_by: object) -> None:
    """The error names the field."""
    with pytest.raises(SpecError, match="ends_by"):
        end_of(ends_by, start=EVENING)
