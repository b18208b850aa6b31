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


@pytest.mark.parametrize("ends_by", ["", "soon", "25:00", "7", timedelta(0), "PT0S", "PT", 7, None])
def test_what_means_no_moment_is_refused(ends_by: object) -> None:
    """The error names the field."""
    with pytest.raises(SpecError, match="ends_by"):
        end_of(ends_by, start=EVENING)
