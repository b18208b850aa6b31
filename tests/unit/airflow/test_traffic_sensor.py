"""Waiting for a traffic window."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.airflow.fakes import MadeUpSite, deferred_by, event_of, rendered

from edl_airflow.sensors.traffic import EdlTrafficSensor
from edl_airflow.traffic_wait import TrafficWait
from edl_airflow.triggers.traffic import EdlTrafficTrigger
from edl_airflow.waiting import judge
from edl_airflow.windows import as_data, as_windows
from edl_airflow.work import Outcome

WINDOWS = as_windows(
    {
        "windows": [
            {"name": "day", "start": "07:00", "end": "22:00", "sizes": {"cluster": {"gpu": 2}}},
            {"name": "night", "start": "22:00", "end": "07:00", "sizes": {"cluster": {"gpu": "75%"}}},
        ]
    }
)
NOON, EVENING = datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp(), datetime(2026, 1, 1, 22, tzinfo=UTC).timestamp()
NIGHT = {
    "window": "night",
    "start": "2026-01-01T22:00:00+00:00",
    "end": "2026-01-02T07:00:00+00:00",
    "sizes": {"cluster": {"gpu": "75%"}},
}
WAIT = TrafficWait(windows=WINDOWS, window="night", until=1e12, waits_s=60)
ROOM = TrafficWait(windows=WINDOWS, at_least={"gpu": 6}, total={"gpu": 8}, until=1e12, waits_s=60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the time in workers and triggerers; what sleeps there sleeps no longer than a moment."""

    def is_at(now: float) -> None:
        monkeypatch.setattr("edl_airflow.sensors.traffic.clock", lambda: now)
        monkeypatch.setattr("edl_airflow.triggers.traffic.clock", lambda: now)

    return is_at


def wait_for_night(**changes: Any) -> EdlTrafficSensor:
    given = {"task_id": "wait", "windows": WINDOWS, "window": "night", "deferrable": True, **changes}
    return EdlTrafficSensor(**given)


@pytest.mark.parametrize(
    ("wait", "now", "ended"),
    [
        (WAIT, NOON, None),
        (WAIT, EVENING, "ready"),
        (WAIT, EVENING - 0.001, None),
        (ROOM, NOON, None),
        (ROOM, EVENING, "ready"),
        (msgspec.structs.replace(ROOM, at_least={"gpu": 2}), NOON, "ready"),
        (msgspec.structs.replace(ROOM, at_least={"gpu": 2}, window="night"), NOON, None),
        (msgspec.structs.replace(ROOM, quota={"gpu": 6}), EVENING, "ready"),
        (msgspec.structs.replace(ROOM, quota={"gpu": 5}), EVENING, "impossible"),
        (msgspec.structs.replace(ROOM, at_least={"gpu": 7}), NOON, "impossible"),
        (msgspec.structs.replace(ROOM, at_least={"gpu": 7}), EVENING, "impossible"),
        (msgspec.structs.replace(ROOM, window="day"), EVENING, "impossible"),
        (msgspec.structs.replace(WAIT, until=NOON), NOON, "not_yet"),
        (msgspec.structs.replace(WAIT, until=NOON, deadline=NOON), NOON, "timed_out"),
        (msgspec.structs.replace(WAIT, until=EVENING), EVENING, "ready"),
    ],
)
def test_what_is_waited_for(wait: TrafficWait, now: float, ended: str | None) -> None:
    """The window, or room enough; what no window has is not waited for."""
    outcome = judge(wait, wait.view(now), now)
    assert (outcome.ended if outcome else None) == ended


def test_what_lacks_is_said() -> None:
    """When the time is up, or when it never comes."""
    late = judge(msgspec.structs.replace(WAIT, until=NOON), WAIT.view(NOON), NOON)
    assert late
    assert (late.name, late.reason) == ("window 'night'", "'day' holds until 2026-01-01T22:00:00+00:00")
    never = judge(msgspec.structs.replace(ROOM, at_least={"gpu": 7}), ROOM.view(NOON), NOON)
    assert never
    assert never.name == "a window with at least 7 gpu"
    assert never.reason == "no window is that: day (at most 2 gpu), night (at most 75% of gpu); of 8 gpu"
    always = as_windows({"windows": [{"name": "on", "start": "00:00", "end": "24:00", "sizes": {}}], "default": {}})
    wait = msgspec.structs.replace(WAIT, windows=always, window="default")
    stuck = judge(wait, wait.view(NOON), NOON)
    assert stuck
    assert (stuck.ended, stuck.reason) == ("impossible", "'on' holds, and does not end within 400 days")


@pytest.mark.parametrize(
    ("changes", "now", "pause_s"),
    [
        ({}, NOON, 60),
        ({}, EVENING - 7, 7),
        ({}, EVENING - 0.001, 0.1),
        ({"until": NOON + 30}, NOON, 30),
        ({"deadline": NOON + 20}, NOON, 20),
    ],
)
def test_it_sleeps_until_the_window_ends(changes: dict[str, Any], now: float, pause_s: float) -> None:
    """But looks at the clock each minute, for it may be set; and it ends in time."""
    wait = msgspec.structs.replace(WAIT, **changes)
    assert wait.pause_s(wait.view(now), now) == pytest.approx(pause_s)


async def test_the_trigger_fires_at_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """After sleeps of a minute and one of the rest; clocks that jump forth or back meanwhile are followed."""
    monkeypatch.setattr("edl_airflow.triggers.base.FIRST_EVENT_AFTER_S", 0.0)
    now, slept, real_sleep = NOON, list[float](), asyncio.sleep
    jumps = {1: EVENING - 90 - 60, 3: EVENING - 100 - 40}  # at the second sleep forth, at the fourth back

    async def sleep(delay: float) -> None:
        nonlocal now
        if delay:
            now = jumps.get(len(slept), now) + delay
            slept.append(round(delay, 3))
        await real_sleep(0)

    monkeypatch.setattr("edl_airflow.triggers.traffic.clock", lambda: now)
    monkeypatch.setattr("asyncio.sleep", sleep)
    (event,) = [event async for event in EdlTrafficTrigger(msgspec.to_builtins(WAIT)).run()]
    assert (event.payload["ended"], event.payload["window"]) == ("ready", NIGHT)
    assert slept == [60, 60, 60, 30, 60, 50]
    assert now == EVENING


def test_the_trigger_survives_its_way_to_the_triggerer() -> None:
    """JSON and back is the same wait, in the same order in every process."""
    windows = as_windows({**as_data(WINDOWS), "holidays": ["2026-01-02", "2026-01-01"]})
    wait = msgspec.structs.replace(ROOM, windows=windows)
    path, kwargs = EdlTrafficTrigger(msgspec.to_builtins(wait)).serialize()
    assert path == "edl_airflow.triggers.traffic.EdlTrafficTrigger"
    again = EdlTrafficTrigger(**json.loads(json.dumps(kwargs)))
    assert again.wait == wait
    assert again.serialize() == (path, kwargs)


def test_the_sensor_looks_once_and_defers(context: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no connection; a fresh one returns the window."""
    monkeypatch.delenv("AIRFLOW_CONN_EDL_DEFAULT")
    clock(NOON)
    deferred = deferred_by(rendered(wait_for_night(window="{{ 'night' }}"), context), context)
    assert deferred.trigger.wait.window == "night"
    clock(EVENING)
    assert wait_for_night().execute(context) == NIGHT
    assert wait_for_night(deferrable=False).execute(context) == NIGHT
    event = event_of(deferred, Outcome(ended="ready", name="night", window=NIGHT))
    assert wait_for_night().execute_complete(context, json.loads(json.dumps(event))) == NIGHT


def test_the_log_says_what_is_waited_for(context: Any, clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Before hours of sleep, and once, however often it is looked."""
    clock(NOON)
    deferred_by(wait_for_night(), context)
    said = "Waiting for \"window 'night'\": 'day' holds until 2026-01-01T22:00:00+00:00"
    assert said in capsys.readouterr().out
    looks = wait_for_night(deferrable=False)
    assert not looks.poke(context)
    assert not looks.poke(context)
    assert capsys.readouterr().out.count(said) == 1


def test_a_wait_for_room_is_of_what_the_cluster_has(context: Any, clock: Any, site: MadeUpSite) -> None:
    """All nodes together; what no window leaves is not waited for, nor what there is none of."""
    clock(NOON)
    deferred = deferred_by(rendered(wait_for_night(window=None, at_least={"gpu": "{{ 6 }}"}), context), context)
    wait = deferred.trigger.wait
    assert (wait.window, wait.at_least, wait.total) == ("", {"gpu": 6}, {"gpu": 8, "cpu": 16})
    with pytest.raises(AirflowFailException, match=r"at least 7 gpu': no window is that.*of 16 cpu, 8 gpu"):
        wait_for_night(window=None, at_least={"gpu": 7}).execute(context)
    with pytest.raises(AirflowFailException, match="at_least: got 'tpu', allowed is what the cluster has: cpu, gpu"):
        wait_for_night(window=None, at_least={"tpu": 1}).execute(context)
    site.backend.nodes = []
    with pytest.raises(AirflowFailException, match="at_least: got 'gpu'"):
        wait_for_night(window=None, at_least={"gpu": 1}).execute(context)


def test_a_variable_is_read_when_the_task_runs(context: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its mistakes are the task's, which is not tried again."""
    sensor = wait_for_night(windows="variable:traffic")
    with pytest.raises(AirflowFailException, match="Variable 'traffic', name: got 'traffic'"):
        sensor.execute(context)
    monkeypatch.setenv("AIRFLOW_VAR_TRAFFIC", json.dumps(as_data(WINDOWS)))
    clock(EVENING)
    assert sensor.execute(context) == NIGHT
    with pytest.raises(AirflowFailException, match="window: got 'nihgt', allowed is one of 'day', 'night'"):
        wait_for_night(windows="variable:traffic", window="nihgt").execute(context)
