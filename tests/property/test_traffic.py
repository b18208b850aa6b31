"""Traffic windows for any schema and moment, and profiles learned from any samples."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edl_runtime.autoscale.traffic.forecast import DAY_S, ForecastOptions, Sample, learn_profile
from edl_runtime.autoscale.traffic.schema import read_windows, to_windows
from edl_runtime.autoscale.traffic.sources.spec import CsvFile, Prometheus, RedisStream, Traffic
from edl_runtime.autoscale.traffic.windows import DAYS, Size, Sizes, TrafficWindows, Window, format_clock
from edl_runtime.errors import SpecError

ZONES = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"])
MOMENTS = st.datetimes(datetime(2025, 1, 1), datetime(2027, 12, 31)).map(lambda naive: naive.replace(tzinfo=UTC))  # noqa: DTZ001
CUTS = st.lists(st.integers(0, 1439), min_size=2, max_size=6, unique=True).map(sorted)

DAY = """
time_zone: Europe/Berlin
holidays: [2026-12-25]
windows:
  - name: evening
    start: 18:00
    end: 23:00
    days: [weekdays, sat]
    sizes:
      cluster: {gpu: 14}
      jobs: {nightly: 25%}
      pools: {resnext: 2}
  - name: night
    start: 23:00
    end: 6:30
    sizes: {cluster: 100%}
default:
  cluster: 75%
"""


def partition(cuts: Sequence[int], zone: str, holidays: Sequence[date] = ()) -> TrafficWindows:
    """Return windows that follow one another around the clock, one of them across midnight most often."""
    spans = zip(cuts, [*cuts[1:], cuts[0]], strict=True)
    windows = [Window(name=f"from {format_clock(start)}", start=start, end=end, sizes=Sizes()) for start, end in spans]
    return TrafficWindows(windows=tuple(windows), time_zone=zone, holidays=frozenset(holidays))


@given(CUTS, ZONES, MOMENTS)
def test_one_window_holds_at_each_moment(cuts: list[int], zone: str, moment: datetime) -> None:
    """It is the one that the clock on the wall tells, also on days when clocks change."""
    wall = moment.astimezone(ZoneInfo(zone))
    minute = wall.hour * 60 + wall.minute
    begun = max((cut for cut in cuts if cut <= minute), default=cuts[-1])
    assert partition(cuts, zone).at(moment).name == f"from {format_clock(begun)}"


@given(CUTS, ZONES, MOMENTS)
def test_spans_follow_one_another(cuts: list[int], zone: str, moment: datetime) -> None:
    """A span has the moment in it, the same is told at both its ends, and the next begins where it ends."""
    windows = partition(cuts, zone)
    span = windows.at(moment)
    assert span.start is not None
    assert span.end is not None
    assert span.start <= moment < span.end
    assert windows.at(span.start) == span == windows.at(span.end - timedelta(seconds=1))
    after = windows.at(span.end)
    assert after.start == span.end
    assert after.name != span.name


FORWARD = ("Europe/Berlin", datetime(2026, 3, 29, 1, tzinfo=UTC))
BACK = ("Europe/Berlin", datetime(2026, 10, 25, 1, tzinfo=UTC))
CLOCK_CHANGES = st.sampled_from(
    [
        FORWARD,
        BACK,
        ("America/New_York", datetime(2026, 3, 8, 7, tzinfo=UTC)),
        ("Australia/Lord_Howe", datetime(2026, 4, 4, 15, tzinfo=UTC)),  # by half an hour
        ("Africa/Cairo", datetime(2026, 4, 23, 22, tzinfo=UTC)),  # from midnight to 01:00
        ("Africa/Cairo", datetime(2026, 10, 29, 21, tzinfo=UTC)),  # from midnight to 23:00
        ("America/Scoresbysund", datetime(2026, 3, 29, 1, tzinfo=UTC)),  # from 23:00 to midnight
        ("America/St_Johns", datetime(2010, 11, 7, 2, 31, tzinfo=UTC)),  # from 00:01 to 23:01
        ("Pacific/Apia", datetime(2011, 12, 30, 10, tzinfo=UTC)),  # a whole day is left out
    ]
)
KINDS = st.sets(st.sampled_from(["mon", "wed", "fri", "sat", "sun"]), min_size=1).map(frozenset)
TIMES_OF_DAY = st.integers(0, 1439) | st.sampled_from([0, 1, 60, 90, 120, 150, 180, 1380, 1410])


ALL_DAYS = frozenset(DAYS[:7])


@given(CLOCK_CHANGES, TIMES_OF_DAY, TIMES_OF_DAY, KINDS)
@example(FORWARD, 22 * 60, 6 * 60, ALL_DAYS)  # across midnight it has seven hours then,
@example(BACK, 22 * 60, 6 * 60, ALL_DAYS)  # or nine
@example(FORWARD, 18 * 60, 24 * 60, ALL_DAYS)  # it ends at midnight, though clocks change in that night
@example(FORWARD, 60, 150, ALL_DAYS)  # it ends in an hour that is left out, so where clocks change
@example(BACK, 120, 150, ALL_DAYS)  # it lies in an hour that comes twice, and so does it
def test_edges_are_where_the_clock_on_the_wall_has_them(
    change: tuple[str, datetime], start: int, end: int, days: frozenset[str]
) -> None:
    """Minute by minute around a change of clocks: from each side of an edge both know of it."""
    if start == end:
        end += 1
    window = Window(name="window", start=start, end=end, days=days, sizes=Sizes())
    windows = TrafficWindows(windows=(window,), default=Sizes(), time_zone=change[0])

    def holds(moment: datetime) -> bool:
        wall = moment.astimezone(ZoneInfo(change[0]))
        minute = wall.hour * 60 + wall.minute
        begun = wall.date() - timedelta(days=end < start and minute < end)
        return DAYS[begun.weekday()] in days and (start <= minute < end or (end < start and not end <= minute < start))

    moments = [change[1] + timedelta(minutes=by) for by in range(-2000, 2000)]
    held = [holds(moment) for moment in moments]
    edges = [
        after for (before, after), (one, other) in zip(pairwise(moments), pairwise(held), strict=True) if one != other
    ]
    for moment in [moments[0], *edges]:
        following = [edge for edge in edges if edge > moment]
        last = following[0] - timedelta(seconds=1) if following else moments[-1]
        for inside in (moment, last):
            span = windows.at(inside)
            assert (span.name == "window") == holds(inside)
            assert span.end == following[0] if following else span.end is None or span.end > moments[-1]
            assert span.start == moment if moment in edges else span.start is None or span.start <= moment


def test_a_holiday_is_no_day_of_the_week() -> None:
    """On it only windows of the day "holiday" start; one of the evening before still ends."""
    windows = read_windows(DAY)
    assert windows.at(datetime(2026, 12, 24, 18, tzinfo=UTC)).name == "evening"
    assert windows.at(datetime(2026, 12, 25, 5, tzinfo=UTC)).name == "night"
    assert windows.at(datetime(2026, 12, 25, 18, tzinfo=UTC)).name == "default"
    assert windows.at(datetime(2026, 12, 25, 22, tzinfo=UTC)).name == "night"  # of all days


def test_sizes_say_what_training_may_have() -> None:
    """Numbers, shares, and all of what is not named."""
    windows = read_windows(DAY)
    evening = windows.at(datetime(2026, 6, 1, 17, tzinfo=UTC)).sizes
    capacity = evening.capacity({"gpu": 32, "cpu": 64})
    assert capacity == {"gpu": 14, "cpu": 64}
    assert evening.most("jobs", "nightly", {"gpu": 1}, capacity) == 3
    assert evening.most("pools", "resnext", {"gpu": 1}, capacity) == 2
    assert evening.most("jobs", "another", {"gpu": 1}, capacity) is None
    assert windows.at(datetime(2026, 6, 1, 10, tzinfo=UTC)).sizes.capacity({"gpu": 32}) == {"gpu": 24}


def test_yaml_and_python_are_one_schema() -> None:
    """What a dict says, a text of YAML says, too."""
    evening = {
        "name": "evening",
        "start": "18:00",
        "end": "23:00",
        "days": ["mon", "tue", "wed", "thu", "fri", "sat"],
        "sizes": {"cluster": {"gpu": 14}, "jobs": {"nightly": "25%"}, "pools": {"resnext": 2}},
    }
    night = {"name": "night", "start": "23:00", "end": "06:30", "sizes": {"cluster": "100%"}}
    plain = {
        "time_zone": "Europe/Berlin",
        "holidays": [date(2026, 12, 25)],
        "windows": [evening, night],
        "default": {"cluster": "75%"},
    }
    assert read_windows(DAY) == to_windows(plain)
    assert to_windows(plain | {"holidays": [datetime(2026, 12, 25, tzinfo=UTC)]}) == to_windows(plain)


TRAFFIC = (
    DAY
    + """traffic:
  resource: gpu
  prometheus:
    url: https://prometheus.example/a
    query: 'sum(rate(http_requests_total[5m]))'
    step_s: 30
    token_env: EDL_TRAFFIC_TOKEN
  times: 0.002
  headroom: 1.3
  slot_s: 900
"""
)
PROMETHEUS = """prometheus:
    url: https://prometheus.example/a
    query: 'sum(rate(http_requests_total[5m]))'
    step_s: 30
    token_env: EDL_TRAFFIC_TOKEN"""


def test_a_traffic_source_stands_beside_the_windows() -> None:
    """Each kind in YAML and in Python; what is not said is as it is by default."""
    query = "sum(rate(http_requests_total[5m]))"
    source = Prometheus(url="https://prometheus.example/a", query=query, step_s=30, token_env="EDL_TRAFFIC_TOKEN")
    careful = ForecastOptions(headroom=1.3, slot_s=900)
    assert read_windows(TRAFFIC).traffic == Traffic(
        resource="gpu", source=source, times=0.002, forecast_options=careful
    )
    stream = read_windows(TRAFFIC.replace(PROMETHEUS, "redis: {stream: web-load}")).traffic
    assert stream is not None
    assert stream.source == RedisStream(stream="web-load")
    plain = {"windows": [], "default": {}, "traffic": {"resource": "cpu", "csv": {"path": "~/web.csv"}}}
    assert to_windows(plain).traffic == Traffic(resource="cpu", source=CsvFile(path="~/web.csv"))
    assert read_windows(DAY).traffic is None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("Europe/Berlin", "Europe/Bärlin", "line 2: time_zone: got 'Europe/Bärlin', allowed is a name of the tz"),
        ("2026-12-25", "2026-02-30", "line 3: holidays[0]: got '2026-02-30', allowed is a date"),
        ("end: 23:00", "end: 25:00", "line 7: windows[0].end: got '25:00', allowed is a time of day"),
        ("end: 23:00", "end: 18:00", "line 7: windows[0].end: got '18:00', allowed is another time than its start"),
        ("start: 18:00", "start: 24:00", "line 6: windows[0].start: got '24:00', allowed is 00:00 to 23:59"),
        ("[weekdays, sat]", "[monday]", "line 8: windows[0].days: got 'monday', allowed is some of mon, tue"),
        ("gpu: 14", "gpu: many", "line 10: windows[0].sizes.cluster.gpu: got 'many', allowed is a number, or a share"),
        ("cluster: 75%", "cluster: 120%", "line 18: default.cluster: got '120%', allowed is a number, 0 or more, or a"),
        ("resnext: 2", "resnext: 2.5", "line 12: windows[0].sizes.pools.resnext: got '2.5', allowed is a whole number"),
        (
            "resnext: 2",
            "resnext: 80%",
            "line 9: windows[0].sizes.shares: got 'nightly 25% + resnext 80% = 105%', allowed",
        ),
        ("name: night", "name: evening", "line 13: windows[1].name: got 'evening', allowed is a unique name"),
        (
            "start: 23:00",
            "start: 22:00",
            "line 13: windows[1]: got \"'evening' and 'night' on mon from 22:00 to 23:00\", allowed is one window at a",
        ),
        (
            "default:\n  cluster: 75%",
            "",
            "line 4: windows: got 'none on mon from 06:30 to 18:00', allowed is a window for each time, or `default`",
        ),
        ("start: 18:00", "begin: 18:00", "line 6: windows[0].begin: got '18:00', allowed is one of days, end, name"),
        (
            "end: 6:30",
            "end: 6:30\n    end: 7:00",
            "line 16: windows[1].end: got 'a second value', allowed is one value for each field",
        ),
        ("gpu: 14", "gpu: {{ a }}", "line 10: windows[0].sizes.cluster.gpu: got 'a key that is no text', allowed is a"),
        ("holidays: [", "holidays: ", "line 3: holidays: got '2026-12-25]', allowed is a list"),
        ("resource: gpu", "resource: ''", "line 20: traffic.resource: got '', allowed is the name of a resource"),
        ("resource: gpu", "", "line 19: traffic.resource: got '', allowed is the name of a"),
        ("https://prom", "prom", "line 22: traffic.prometheus.url: got 'prometheus.example/a', allowed is http:// or"),
        ("https://", "https://me:secret@", "line 22: traffic.prometheus.url: got 'a URL with more than host, port and"),
        ("url: https://prometheus.example/a", "", "line 21: traffic.prometheus.url: got None, allowed is given"),
        ("step_s: 30", "step_s: 0", "line 24: traffic.prometheus.step_s: got 0.0, allowed is seconds, 1 or more"),
        ("step_s: 30", "step_s: 1m", "line 24: traffic.prometheus.step_s: got '1m', allowed is a number"),
        ("step_s: 30", "timeout_s: 0", "line 24: traffic.prometheus.timeout_s: got 0.0, allowed is seconds, above 0"),
        ("step_s: 30", "steps: 30", "line 24: traffic.prometheus.steps: got 30.0, allowed is one of query, step_s"),
        ("EDL_TRAFFIC_TOKEN", "eyJhb-ci", "line 25: traffic.prometheus.token_env: got '8 characters that are no"),
        ("0.002", "-1", "line 26: traffic.times: got -1.0, allowed is a number above 0"),
        ("1.3", "0.9", "line 27: traffic.headroom: got 0.9, allowed is 1 or more"),
        ("slot_s: 900", "lead_s: -1", "line 28: traffic.lead_s: got -1.0, allowed is seconds, 0 to 31,622,400: a year"),
        ("900", "900.5", "line 28: traffic.slot_s: got 900.5, allowed is seconds that divide a day"),
        ("times: 0.002", "headrom: 2", "line 26: traffic.headrom: got 2.0, allowed is one of burst_headroom, csv"),
        ("times: 0.002", "csv: {path: a}", "line 19: traffic: got 'prometheus and csv', allowed is one source: prom"),
        (PROMETHEUS, "lead_s: 2", "line 19: traffic: got 'no source', allowed is one source: prometheus, redis, csv"),
        (PROMETHEUS, "redis: {stream: ''}", "line 21: traffic.redis.stream: got '', allowed is the key of a stream"),
        (PROMETHEUS, "csv: {path: ''}", "line 21: traffic.csv.path: got '', allowed is the path of a CSV file"),
        (PROMETHEUS, "csv: /data/web.csv", "line 21: traffic.csv: got '/data/web.csv', allowed is a mapping of path"),
    ],
)
def test_a_mistake_is_reported_with_its_line(old: str, new: str, says: str) -> None:
    """It says where it is, what was given and what is allowed, and shows no secret that stands where none belongs."""
    assert old in TRAFFIC
    with pytest.raises(SpecError, match="^" + re.escape(says)) as raised:
        read_windows(TRAFFIC.replace(old, new, 1))
    assert "secret" not in str(raised.value)
    assert "eyJ" not in str(raised.value)


FIELDS = (
    *("windows", "name", "start", "end", "days", "sizes", "default", "cluster", "jobs", "holidays"),
    *("traffic", "resource", "prometheus", "redis", "csv", "url", "stream", "path", "slot_s", "times"),
)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text("aä:%-0 \n", max_size=5)
    | st.sampled_from(["18:00", "40%", *DAYS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
)


@given(PLAIN)
def test_any_data_are_windows_or_a_mistake(data: Any) -> None:
    """Nothing but SpecError is raised, and what is made of the data works."""
    try:
        windows = to_windows(data)
    except SpecError:
        return
    assert windows.at(datetime(2026, 1, 1, tzinfo=UTC)).name


@given(st.text("ab:-[]{}&*!%|> \n\"'0", max_size=40))
def test_any_text_is_windows_or_a_mistake(text: str) -> None:
    """Broken YAML, and YAML of something else, is a SpecError that begins with its line."""
    with pytest.raises(SpecError, match=r"^line \d+: "):
        read_windows(text)


WEEKS = st.lists(st.floats(0, 50), min_size=24, max_size=24)
HOUR = ForecastOptions(slot_s=3600, lead_s=3600, headroom=1.0, burst_headroom=1.0)


@given(WEEKS, st.floats(0, 50), st.integers(0, 6))
def test_a_profile_learns_a_day_and_not_a_burst(day: list[float], burst: float, day_of_burst: int) -> None:
    """After a week the profile is the day's median with its neighbours', whatever one day was like."""
    week = [Sample(at_s=h * 3600.0, needed=burst if h // 24 == day_of_burst else day[h % 24]) for h in range(7 * 24)]
    profile = learn_profile(week, now_s=7.0 * DAY_S, forecast_options=HOUR)
    for hour in range(24):
        near = sorted(day[(hour + by) % 24] for by in (-1, 0, 1))
        expected = profile.expected(7 * DAY_S + hour * 3600.0)
        assert expected is not None
        assert near[0] <= expected <= near[2]


@given(WEEKS, st.lists(st.floats(0, 50), max_size=10))
def test_a_profile_learns_nothing_from_what_is_to_come(day: list[float], later: list[float]) -> None:
    """Samples after now change nothing, nor do such that are no number."""
    past = [Sample(at_s=hour * 3600.0, needed=need) for hour, need in enumerate(day)]
    future = [Sample(at_s=DAY_S + 1.0 + hour, needed=need) for hour, need in enumerate(later)]
    broken = [Sample(at_s=3600.0, needed=math.nan), Sample(at_s=3600.0, needed=math.inf), Sample(at_s=0.0, needed=-1.0)]
    assert learn_profile(past, now_s=DAY_S) == learn_profile([*past, *future, *broken], now_s=DAY_S)


def test_what_is_too_long_ago_is_forgotten() -> None:
    """A profile follows the web: four weeks later only the new shape is known."""
    hours = range(5 * 7 * 24)
    grown = [Sample(at_s=hour * 3600.0, needed=4.0 if hour < 7 * 24 else 9.0) for hour in hours]
    assert set(learn_profile(grown, now_s=35.0 * DAY_S).slots.values()) == {9.0}


def test_a_size_is_a_number_or_a_part() -> None:
    """At most the whole."""
    assert Size(14).of(32) == 14
    assert Size(40).of(32) == 32
    assert Size(0.25, share=True).of(32) == 8
    with pytest.raises(SpecError, match=r"size: got '150%'"):
        Size(1.5, share=True)
