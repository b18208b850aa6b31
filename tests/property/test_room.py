"""What is left to training, whatever is known of the web."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.autoscale.profile import DAY_S, Foresight, Need, Profile, Sample, learn
from edl_runtime.autoscale.room import Outlook, declared_room, room_for_training
from edl_runtime.autoscale.traffic_schema import to_windows

TOTAL = {"gpu": 32.0, "cpu": 64.0}
EVENING = {"name": "evening", "start": "18:00", "end": "23:00", "sizes": {"cluster": {"gpu": 14}}}
WINDOWS = to_windows({"windows": [EVENING], "default": {"cluster": "75%"}})
START_S = datetime(2026, 6, 10, tzinfo=UTC).timestamp()

NUMBERS = st.floats(0, 100) | st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e300])
TIMES = st.floats(-2 * DAY_S, 2 * DAY_S).map(lambda by: START_S + by)
SAMPLES = st.lists(st.builds(Sample, TIMES, NUMBERS), max_size=5)
PROFILES = SAMPLES.map(lambda seen: learn(seen, now_s=START_S + 2 * DAY_S)) | st.just(
    learn(
        [Sample(START_S + 600.0 * number, number % 144 / 8) for number in range(-7 * 144, 144)], now_s=START_S + DAY_S
    )
)
FORESIGHTS = st.builds(
    Foresight,
    headroom=st.floats(1, 3),
    burst_headroom=st.floats(1, 3),
    lead_s=st.floats(0, DAY_S),
    silent_after_s=st.floats(0, DAY_S),
)


@given(PROFILES, SAMPLES, FORESIGHTS, st.floats(0, DAY_S - 1), st.floats(0, 7200))
def test_training_has_what_the_web_leaves_or_else_what_windows_do(
    profile: Profile, recent: list[Sample], foresight: Foresight, by: float, lead_s: float
) -> None:
    """Always a number from nothing to all there is; where nobody knows what the web needs, exactly what windows say."""
    now = datetime.fromtimestamp(START_S + by, UTC)
    outlook = Outlook(resource="gpu", profile=profile, recent=recent, foresight=foresight)
    room = room_for_training(WINDOWS, TOTAL, now=now, outlook=outlook, lead_s=lead_s)
    declared = declared_room(WINDOWS, TOTAL, now=now, lead_s=lead_s)
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
    profile = learn([Sample(START_S + 600.0 * number, 5.0) for number in range(-1008, 144)], now_s=START_S + DAY_S)

    def left(needed: float) -> float:
        recent = [Sample(START_S + by, needed)]
        room = room_for_training(
            WINDOWS, TOTAL, now=now, outlook=Outlook(resource="gpu", profile=profile, recent=recent)
        )
        assert isinstance(room.need, Need)
        assert room.need.kept >= needed
        return room.capacity["gpu"]

    assert (left(one) <= left(other)) or one < other
