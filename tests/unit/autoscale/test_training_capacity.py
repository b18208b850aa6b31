"""How much is for training: by what is known of the web, or else by declared windows."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.autoscale.traffic.capacity import TrainingCapacity, declared_capacity, training_capacity
from edl_runtime.autoscale.traffic.forecast import (
    DAY_S,
    Forecast,
    ForecastOptions,
    Profile,
    Sample,
    TrafficNeed,
    learn_profile,
)
from edl_runtime.autoscale.traffic.schema import to_windows

TOTAL = {"gpu": 32.0, "cpu": 128.0}
BERLIN = ZoneInfo("Europe/Berlin")
WINDOWS = to_windows(
    {
        "time_zone": "Europe/Berlin",
        "windows": [{"name": "evening", "start": "18:00", "end": "23:00", "sizes": {"cluster": {"gpu": 14}}}],
        "default": {"cluster": {"gpu": 24, "cpu": "50%"}},
    }
)


def at(clock: str) -> datetime:
    """Return a moment of a Wednesday in Berlin."""
    return datetime.fromisoformat(f"2026-06-10T{clock}").replace(tzinfo=BERLIN)


def profile() -> Profile:
    """Return what two weeks teach in which the web needs 20 from 10:00 to 12:00 in Berlin, else 4."""
    start = at("00:00") - timedelta(days=14)
    times = [start + timedelta(minutes=10 * number) for number in range(14 * 144)]
    samples = [Sample(at_s=time.timestamp(), needed=20 if 10 <= time.hour < 12 else 4) for time in times]
    return learn_profile(samples, now_s=at("00:00").timestamp(), time_zone="Europe/Berlin")


PROFILE = profile()


def room(clock: str, *recent: tuple[str, float], resource: str = "gpu", **more: Any) -> TrainingCapacity:
    """Return what training may use at a time, when the web has said so much at these times."""
    samples = [Sample(at_s=at(time).timestamp(), needed=needed) for time, needed in recent]
    forecast = Forecast(resource=resource, profile=PROFILE, recent=samples, **more)
    return training_capacity(WINDOWS, TOTAL, now=at(clock), forecast=forecast)


@pytest.mark.parametrize(
    ("clock", "recent", "gpus", "why"),
    [
        ("08:00", ("07:59", 4.0), 27.4, "the web is expected to need 4 gpu now, and is left 4.6"),
        ("09:55", ("09:54", 4.0), 9.0, "the web is expected to need 20 gpu by 10:00, and is left 23"),
        ("09:45", ("09:44", 4.0), 27.4, "the web is expected to need 4 gpu now, and is left 4.6"),
        ("11:00", ("10:59", 4.0), 9.0, "the web is expected to need 20 gpu now, and is left 23"),
        ("12:30", ("12:00", 4.0), 27.4, "the web is expected to need 4 gpu now, and is left 4.6"),
        ("08:00", ("07:59", 12.0), 19.4, "the web needs 12 gpu, as of 07:59, and is left 12.6"),
        ("08:00", ("07:59", 60.0), 0.0, "the web needs 60 gpu, as of 07:59, and is left 63"),
    ],
)
def test_training_has_what_the_web_leaves(clock: str, recent: tuple[str, float], gpus: float, why: str) -> None:
    """What it needs now, or is expected to need within the lead time, with headroom; and the reason says which."""
    found = room(clock, recent)
    assert found.capacity["gpu"] == pytest.approx(gpus)
    assert found.why == why
    assert found.need is not None


def test_windows_say_it_of_other_resources() -> None:
    """The web's source speaks of one."""
    assert room("08:00", ("07:59", 4.0)).capacity == {"gpu": pytest.approx(27.4), "cpu": 64}
    without = room("08:00", resource="tpu")
    assert without.capacity == {"gpu": 24, "cpu": 64}
    assert without.why == "the cluster has no tpu: the default sizes hold until 18:00"


@pytest.mark.parametrize(
    ("recent", "why"),
    [
        ([("19:25", 4.0)], "no sample from the source for 35 min: window 'evening' holds until 23:00"),
        ([], "no sample from the source: window 'evening' holds until 23:00"),
        ([("20:02", 4.0)], "all samples are in the future, from 2 min ahead on: window 'evening' holds"),
        ([("19:59", math.nan)], "no valid sample from the source: window 'evening' holds"),
        (
            [("19:25", 4.0), ("19:59", math.nan), ("22:00", 1.0)],
            "no sample from the source for 35 min: window 'evening'",
        ),
    ],
)
def test_windows_hold_while_the_source_is_silent(recent: list[tuple[str, float]], why: str) -> None:
    """A stale metric, a clock that jumps and what is no number: the declared windows, and the reason in words."""
    found = room("20:00", *recent)
    assert found.capacity == {"gpu": 14, "cpu": 128}
    assert found.why.startswith(why)
    assert found.need is None
    declared = declared_capacity(WINDOWS, TOTAL, now=at("20:00"))
    assert found == msgspec.structs.replace(declared, why=found.why)


def test_a_clock_that_jumps_back_does_not_swing_the_capacity() -> None:
    """A sample of the future changes nothing beside one that is not, whatever it says."""
    assert room("08:00", ("07:59", 4.0), ("09:00", 30.0)) == room("08:00", ("07:59", 4.0))


def test_a_profile_that_does_not_know_the_day_leaves_it_to_windows() -> None:
    """Only days of work were seen, and it is a Sunday."""
    weekdays = [Sample(at_s=at("00:00").timestamp() - DAY_S + 600 * number, needed=4) for number in range(144)]
    sunday = at("08:00") + timedelta(days=4)
    forecast = Forecast(
        resource="gpu",
        profile=learn_profile(weekdays, now_s=sunday.timestamp(), time_zone="Europe/Berlin"),
        recent=[Sample(at_s=sunday.timestamp(), needed=4)],
    )
    found = training_capacity(WINDOWS, TOTAL, now=sunday, forecast=forecast)
    assert found.capacity["gpu"] == 24
    assert found.why.startswith("no earlier day like this one has samples of this time: the default sizes")


def test_an_error_of_the_source_is_shown_at_once_and_counts_when_its_last_sample_is_old() -> None:
    """One pass that could not ask changes nothing; once the source is silent for long, windows hold."""
    found = room("08:00", ("07:50", 4.0), trouble="it is away")
    assert found.capacity["gpu"] == pytest.approx(27.4)
    assert found.why == "the web is expected to need 4 gpu now, and is left 4.6 (it is away)"
    late = room("08:40", ("07:50", 4.0), trouble="it is away")
    assert late.why == "no sample from the source for 50 min (it is away): the default sizes hold until 18:00"


def test_windows_give_way_before_one_begins() -> None:
    """Within the lead time the least counts, until says when that may be other, and the reason names both."""
    quiet = training_capacity(WINDOWS, TOTAL, now=at("12:00"))
    assert (quiet.capacity, quiet.until) == ({"gpu": 24, "cpu": 64}, at("17:59"))
    soon = training_capacity(WINDOWS, TOTAL, now=at("17:59:30"))
    assert (soon.capacity, soon.until) == ({"gpu": 14, "cpu": 64}, at("18:00"))
    assert soon.why == "the default sizes hold, and from 18:00 on window 'evening'"
    assert training_capacity(WINDOWS, TOTAL, now=at("18:00")).why == "window 'evening' holds until 23:00"
    quiet_day = {"name": "quiet", "start": "00:00", "end": "24:00", "days": ["holiday"], "sizes": {}}
    far = to_windows({"holidays": ["2026-12-25"], "windows": [quiet_day], "default": {}})
    first = training_capacity(far, TOTAL, now=datetime(2026, 12, 1, tzinfo=UTC))
    assert first.why == "the default sizes hold until 00:00 on Fri 25 Dec"
    for_ever = training_capacity(far, TOTAL, now=datetime(2027, 1, 5, tzinfo=UTC))
    assert (for_ever.why, for_ever.until) == ("the default sizes hold", None)


def test_the_lead_time_is_no_longer_when_clocks_go_back() -> None:
    """Half a minute before an hour that comes twice, a window that begins after it is an hour off."""
    early = {"name": "early", "start": "03:00", "end": "06:00", "sizes": {"cluster": {"gpu": 1}}}
    windows = to_windows({"time_zone": "Europe/Berlin", "windows": [early], "default": {"cluster": {"gpu": 9}}})
    now = datetime(2026, 10, 25, 2, 59, 30, tzinfo=BERLIN)
    found = declared_capacity(windows, TOTAL, now=now)
    assert (found.capacity["gpu"], found.why) == (9, "the default sizes hold until 03:00")
    assert found == declared_capacity(windows, TOTAL, now=now.astimezone(UTC))


def test_the_lead_time_is_the_profiles_own() -> None:
    """Jobs shrink as long before the rush as forecast_options says."""
    found = room("09:05", ("09:00", 4), forecast_options=ForecastOptions(lead_s=3600))
    assert found.why == "the web is expected to need 20 gpu by 10:00, and is left 23"


START_S = at("00:00").timestamp()
NUMBERS = st.floats(0, 100) | st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e300])
TIMES = st.floats(-2 * DAY_S, 2 * DAY_S).map(lambda by: START_S + by)
SAMPLES = st.lists(st.builds(Sample, TIMES, NUMBERS), max_size=5)
PROFILES = SAMPLES.map(lambda seen: learn_profile(seen, now_s=START_S + 2 * DAY_S)) | st.just(
    learn_profile(
        [Sample(START_S + 600.0 * number, number % 144 / 8) for number in range(-7 * 144, 144)], now_s=START_S + DAY_S
    )
)
FORESIGHTS = st.builds(
    ForecastOptions,
    headroom=st.floats(1, 3),
    burst_headroom=st.floats(1, 3),
    lead_s=st.floats(0, DAY_S),
    silent_after_s=st.floats(0, DAY_S),
)


@given(PROFILES, SAMPLES, FORESIGHTS, st.floats(0, DAY_S - 1), st.floats(0, 7200))
def test_training_has_what_the_web_leaves_or_else_what_windows_do(
    profile: Profile, recent: list[Sample], forecast_options: ForecastOptions, by: float, lead_s: float
) -> None:
    """Always a number from nothing to all there is; where nobody knows what the web needs, exactly what windows say."""
    now = datetime.fromtimestamp(START_S + by, UTC)
    forecast = Forecast(resource="gpu", profile=profile, recent=recent, forecast_options=forecast_options)
    room = training_capacity(WINDOWS, TOTAL, now=now, forecast=forecast, lead_s=lead_s)
    declared = declared_capacity(WINDOWS, TOTAL, now=now, lead_s=lead_s)
    assert all(0 <= room.capacity[name] <= whole for name, whole in TOTAL.items())
    assert room.capacity["cpu"] == declared.capacity["cpu"]
    assert room.why
    if room.need is None:
        assert room.capacity == declared.capacity
        assert room.why.endswith(declared.why)
    else:
        assert room.capacity["gpu"] == max(0.0, 32 - room.need.kept)


@given(st.floats(0, 40), st.floats(0, 40), st.floats(0, DAY_S - 1))
def test_a_web_that_needs_more_leaves_no_more(one: float, other: float, by: float) -> None:
    """And what it needs now it is always left, with headroom for bursts."""
    now = datetime.fromtimestamp(START_S + by, UTC)
    profile = learn_profile(
        [Sample(START_S + 600.0 * number, 5.0) for number in range(-1008, 144)], now_s=START_S + DAY_S
    )

    def left(needed: float) -> float:
        recent = [Sample(START_S + by, needed)]
        room = training_capacity(
            WINDOWS, TOTAL, now=now, forecast=Forecast(resource="gpu", profile=profile, recent=recent)
        )
        assert isinstance(room.need, TrafficNeed)
        assert room.need.kept >= needed
        return room.capacity["gpu"]

    assert (left(one) <= left(other)) or one < other
