"""The timeline of the last day."""

from __future__ import annotations

from typing import Any

import msgspec
from support.autoscale.jobs import capacity

from edl_airflow.plugin.live import Seen
from edl_airflow.plugin.past import DAY_S, MOST_POINTS, Life, Stay, last_stays, timeline
from edl_runtime.autoscale.history import HistoryPoint, JobPoint
from edl_runtime.autoscale.outlook import ExpectedPlan
from edl_runtime.autoscale.planner import MeasuredTraffic
from edl_runtime.elastic.rendezvous.redis_store import Event
from edl_runtime.monitor.snapshot import build_snapshot

NOW = 1_800_000_000.0


def point(before_s: float, *, needed: float | None = None, **running: int) -> HistoryPoint:
    at = NOW - before_s
    jobs = {name: JobPoint(running=count, state="running" if count else "pending") for name, count in running.items()}
    traffic = None if needed is None else MeasuredTraffic(resource="gpu", needed=needed, at=at)
    return HistoryPoint(jobs=jobs, use={}, window="day", traffic=traffic, at=at)


def drawn(
    points: list[HistoryPoint], *, names: set[str], since: float = 0.0, events: Any = None, **more: Any
) -> dict[str, Any]:
    snapshot = build_snapshot([], capacity(), None, {}, NOW)
    seen = Seen(version="1", snapshot=snapshot, jobs={}, lines={}, **more)
    lives = {name: Life(owner="", since=since) for name in names}
    return timeline(points, events or {}, seen, lives, NOW)


def test_a_series_has_each_change_and_gaps_where_nobody_looked() -> None:
    """A point holds for a quarter of an hour at most; states other than running are spans."""
    points = [point(9000, a=1), point(8900, a=1), point(8800, a=0), point(5000, a=2), point(10, a=2, hidden=1)]
    found = drawn(points, names={"a"})
    (series,) = found["series"]
    assert series["name"] == "a"
    assert [[NOW - at, running] for at, running in series["points"]] == [
        [9000, 1], [8800, 0], [7900, None], [5000, 2], [4100, None], [10, 2], [0, 2],
    ]  # fmt: skip
    assert [[NOW - start, NOW - end, what] for start, end, what in series["states"]] == [[8800, 7900, "pending"]]


def test_a_series_begins_with_its_own_run() -> None:
    """What was before was another owner's job of that name."""
    found = drawn([point(90, a=1), point(60, a=0), point(30, a=2)], names={"a"}, since=NOW - 40)
    (series,) = found["series"]
    assert [[NOW - at, running] for at, running in series["points"]] == [[30, 2], [0, 2]]
    assert series["states"] == []
    assert drawn([point(90, a=1)], names={"a"}, since=NOW - 40)["series"] == []


def test_the_last_stay_of_a_name_is_that_of_its_last_owner() -> None:
    """However soon one follows the other, and with a gap."""

    def owned(before_s: float, **owners: str) -> HistoryPoint:
        jobs = {name: JobPoint(running=1, owner=owner) for name, owner in owners.items()}
        return HistoryPoint(jobs=jobs, use={}, at=NOW - before_s)

    points = [owned(90, a="x", b="x"), owned(80, a="y", b="x"), owned(70), owned(60, a="y"), owned(50, a="x")]
    assert last_stays(points) == {"a": Stay("x", NOW - 50, NOW - 50), "b": Stay("x", NOW - 90, NOW - 80)}
    assert last_stays(points[:-1])["a"] == Stay("y", NOW - 80, NOW - 60)


def test_a_day_of_changes_is_bounded() -> None:
    """The last point stays."""
    points = [point(DAY_S - 8.6 * number, a=number % 5 + 1) for number in range(10_000)]
    (series,) = drawn(points, names={"a"})["series"]
    assert MOST_POINTS / 2 < len(series["points"]) <= MOST_POINTS
    assert series["points"][-1][0] == NOW


def test_what_comes_is_drawn_ahead() -> None:
    """The next windows with the policy's targets, for visible jobs alone."""
    expected = (ExpectedPlan(name="night", at=NOW + 60, end=NOW + 600, targets={"a": 3, "hidden": 1}),)
    found = drawn([point(10, a=1)], names={"a"}, expected=expected)
    assert found["series"][0]["ahead"] == [[NOW + 60, 3]]
    assert found["windows"][-1] == {
        "name": "night", "start": NOW + 60, "end": NOW + 600, "ahead": True, "allowed": "",
    }  # fmt: skip
    assert found["ahead_until"] == NOW + 600


def test_measured_traffic_is_drawn_once_for_each_sample() -> None:
    """Points between two samples repeat the last."""
    points = [point(30, needed=2.0), msgspec.structs.replace(point(30, needed=2.0), at=NOW - 20), point(10, needed=3.0)]
    assert drawn(points, names=set())["traffic"] == {"unit": "gpu", "points": [[NOW - 30, 2.0], [NOW - 10, 3.0]]}
    assert drawn([point(10)], names=set())["traffic"] is None


def test_resizes_failures_and_checkpoints_are_marks() -> None:
    """A first generation is no resize; hidden jobs have none."""
    happened = [
        Event(kind="forming", members=(0, 1), at=NOW - 50),
        Event(kind="active", members=(0, 1), at=NOW - 49),
        Event(kind="saved", step=7, at=NOW - 40),
        Event(kind="lost", instance=1, reason="exit status 1", at=NOW - 30),
        Event(kind="forming", members=(0,), reason="instance 1 is gone", at=NOW - 20),
    ]
    marks = drawn([], names={"a"}, events={"a": happened, "hidden": happened})["marks"]
    assert [(mark["kind"], mark["text"]) for mark in marks] == [
        ("checkpoint", "step 7"),
        ("failure", "instance 1: exit status 1"),
        ("resize", "2 → 1 instance: instance 1 is gone"),
    ]


def test_a_failed_worker_is_one_failure() -> None:
    """Its agent reports it as failed and its instance as lost, and a lost instance alone is one, too."""
    failed = Event(kind="failed", instance=0, reason="its worker exited with 1", at=NOW - 50)
    lost = Event(kind="lost", instance=0, at=NOW - 49)
    alone = msgspec.structs.replace(lost, at=NOW - 45)
    happened = [
        failed,
        lost,
        alone,
        msgspec.structs.replace(failed, at=NOW - 40),
        msgspec.structs.replace(lost, at=NOW - 39),
    ]
    marks = drawn([], names={"a"}, events={"a": happened})["marks"]
    assert [mark["text"].rpartition(" ")[2] for mark in marks] == ["1", "lost", "1"]
