"""Traffic windows as DAGs are given them, and tasks that go by them."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from support.airflow.fakes import FakeClient, deferred_by, event_of, job_status, rendered

from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.runtime.spec import TaskOutcome, TrainingStatus
from edl_airflow.sensors.traffic import EdlTrafficSensor, TrafficCondition, TrafficObservation
from edl_airflow.traffic_windows import (
    capacity_in_window,
    check_window,
    describe_days,
    describe_sizes,
    load_windows,
    target_in_window,
    to_window_result,
    window_for_run,
    windows_field,
    windows_to_data,
)
from edl_airflow.triggers.task import EdlConditionTrigger
from edl_airflow.waits import evaluate
from edl_runtime.autoscale.traffic.schema import to_windows
from edl_runtime.autoscale.traffic.windows import DAYS, WindowSpan
from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import Capacity, NodeCapacity, Scaling
from edl_runtime.errors import SpecError
from edl_runtime.specs import Bounds

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
WINDOWS = load_windows(TEXT)
NIGHT = {
    "data_interval_start": datetime(2026, 1, 1, 21, tzinfo=UTC),
    "data_interval_end": datetime(2026, 1, 2, 6, tzinfo=UTC),
}


def test_windows_are_the_same_however_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As themselves, a mapping, a text, a file or a Variable of YAML or JSON."""
    (tmp_path / "w.yaml").write_text(TEXT)
    monkeypatch.setenv("AIRFLOW_VAR_TRAFFIC", TEXT)
    monkeypatch.setenv("AIRFLOW_VAR_JSON", '{"windows": [], "default": {}}')
    given: list[Any] = [WINDOWS, windows_to_data(WINDOWS), tmp_path / "w.yaml", "variable:traffic"]
    assert [load_windows(each) for each in given] == [WINDOWS] * 4
    made: dict[str, Any] = {"as_windows": load_windows, "Path": Path}
    exec(compile('found = as_windows(Path("w.yaml"))', tmp_path / "dag.py", "exec"), made)
    assert made["found"] == WINDOWS, "a relative path starts from the file that calls"
    assert load_windows(Path("w.yaml"), folder=tmp_path) == WINDOWS
    assert load_windows("variable:json") == load_windows('{"windows": [], "default": {}}')


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            TEXT.replace("22:00", "23:00", 1),
            "windows, line 7: windows[1]: got \"'day' and 'night' on mon from 22:00 to 23:00",
        ),
        (TEXT.replace("22:00", "21:00", 1), "windows, line 2: windows: got 'none on mon from 21:00 to 22:00'"),
        (TEXT.replace("Europe/Berlin", "Mars/Phobos"), "windows, line 1: time_zone: got 'Mars/Phobos'"),
        (TEXT.replace("25%", "250%"), "windows, line 6: windows[0].sizes.jobs.nightly: got '250%'"),
        ("nights", "windows: got 'nights', allowed is traffic windows as a mapping, a Path"),
        ("/x/w.yaml", "windows: got '/x/w.yaml', allowed is Path('/x/w.yaml') where that file is meant; else traffic"),
        (7, "windows: got 7, allowed is traffic windows as a mapping, a Path"),
        ({"window": []}, "windows, window: got []"),
        (Path("/nowhere.yaml"), "windows, /nowhere.yaml, file: got"),
        ("variable:none", "windows, Variable 'none', name: got 'none', allowed is an existing Airflow Variable"),
        ("variable:bad", "windows, Variable 'bad', line 2: windows: got 'all'"),
    ],
)
def test_mistakes_name_their_place(given: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file or Variable, the line, the field, what is given and what is allowed."""
    monkeypatch.setenv("AIRFLOW_VAR_BAD", "# mine\nwindows: all\n")
    with pytest.raises(SpecError) as caught:
        load_windows(given)
    assert str(caught.value).startswith(expected)


def test_a_variable_is_left_for_the_run_and_all_else_is_read_with_the_dag(tmp_path: Path) -> None:
    """Mistakes are found early; the API server is asked for nothing when a DAG is read."""
    (tmp_path / "w.yaml").write_text(TEXT)
    for given in (WINDOWS, TEXT, windows_to_data(WINDOWS), Path("w.yaml")):
        assert windows_field(given, tmp_path) == windows_to_data(WINDOWS)
    for later in ("variable:nobody_has_set", "{{ params.windows }}", {"time_zone": "{{ params.zone }}"}):
        assert windows_field(later, tmp_path) == later
    with pytest.raises(SpecError, match="time_zone"):
        windows_field({"time_zone": "Mars/Phobos"}, tmp_path)


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
    assert to_windows(windows_to_data(windows)) == windows
    assert windows_to_data(windows)["holidays"] == ["2026-12-25", "2026-12-26"]
    assert windows_to_data(windows)["windows"][0]["days"] == ["mon", "sun", "holiday"]


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
    span = window_for_run(WINDOWS, context, now)
    assert span.name == name
    assert name == "day" or span.start == NIGHT["data_interval_start"]


def test_a_window_is_returned_as_plain_data() -> None:
    """With its limits; a window without end has none."""
    found = to_window_result(WINDOWS.at(datetime(2026, 1, 2, 12, tzinfo=UTC)))
    sizes = {"cluster": {"gpu": 4}, "jobs": {"nightly": "25%"}}
    assert found == {
        "window": "day",
        "start": "2026-01-02T06:00:00+00:00",
        "end": "2026-01-02T21:00:00+00:00",
        "sizes": sizes,
    }
    always = WindowSpan(name="default", sizes=WINDOWS.windows[1].sizes, start=None, end=None)
    assert to_window_result(always) == {"window": "default", "start": None, "end": None, "sizes": {}}


def test_an_unknown_window_is_refused_with_the_known_ones() -> None:
    """The default is one where there is one."""
    with pytest.raises(SpecError, match=r"window: got 'nihgt', allowed is one of 'day', 'night'$"):
        check_window(WINDOWS, "nihgt")
    with pytest.raises(SpecError, match="only: got 3"):
        check_window(WINDOWS, 3, field="only")
    assert check_window(to_windows({"default": {"jobs": {"a": 1}}}), "default").jobs["a"].amount == 1


@pytest.mark.parametrize(
    ("sizes", "expected"),
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
def test_sizes_in_words(sizes: dict[str, Any], expected: str) -> None:
    """For people."""
    assert describe_sizes(to_windows({"default": sizes}).at(datetime.now(UTC)).sizes) == expected


@pytest.mark.parametrize(
    ("days", "expected"),
    [
        (DAYS, ""),
        (DAYS[:5], "mon to fri"),
        (("sat", "sun"), "sat, sun"),
        (("sun", "mon", "holiday"), "mon, sun, holiday"),
    ],
)
def test_days_in_words(days: tuple[str, ...], expected: str) -> None:
    """Those in a row by the first and the last."""
    assert describe_days(days) == expected


def test_a_window_leaves_a_part_of_all_nodes_and_no_more_than_a_quota() -> None:
    """A quota takes nothing from what training may use of the cluster, but where it is less."""
    total = Capacity(
        nodes=tuple(NodeCapacity(name=name, total={"gpu": 4.0, "cpu": 8.0}, free={}) for name in "ab")
    ).total
    assert total == {"gpu": 8, "cpu": 16}
    half = to_windows({"default": {"cluster": "50%"}}).at(datetime.now(UTC)).sizes
    assert capacity_in_window(half, total, {}) == {"gpu": 4, "cpu": 8}
    assert capacity_in_window(half, total, {"gpu": 3.0, "cpu": 12.0}) == {"gpu": 3, "cpu": 8}


OWN_SIZES: dict[str, Any] = {
    "windows": [
        {"name": "day", "start": "07:00", "end": "22:00", "sizes": {"jobs": {"student": 1}, "pools": {"digits": 0}}},
        {"name": "night", "start": "22:00", "end": "07:00", "sizes": {"jobs": {"student": "50%"}}},
    ]
}
GPUS = Scaling(bounds=Bounds(2, 6), resources={"gpu": 2.0, "cpu": 1.0}, resumes=True)
STUDENT = job_status("student", scaling=GPUS)
POOL = job_status("digits", kind="pool", elastic=False, scaling=GPUS)
NIGHT_RUN = {
    "data_interval_start": datetime(2999, 1, 1, 22, tzinfo=UTC),
    "data_interval_end": datetime(2999, 1, 2, 7, tzinfo=UTC),
}
LEFT = msgspec.structs.replace(STUDENT, phase="pending", wanted=0)


def resize(**changes: Any) -> EdlResizeOperator:
    given: dict[str, Any] = {"task_id": "resize", "job": "student", "windows": OWN_SIZES, "deferrable": True}
    return EdlResizeOperator(**{**given, **changes})


HALF = "window 'night' has 50% of what training may use for it, which is"


@pytest.mark.parametrize(
    ("sizes", "scaling", "instances", "reason"),
    [
        ({"jobs": {"student": 3}}, GPUS, 3, "window 'night' has 3 for it"),
        ({"jobs": {"student": 6}}, GPUS, 6, "window 'night' has 6 for it"),
        ({"jobs": {"student": 9}}, GPUS, 6, "window 'night' has 9 for it, and its maximum is 6"),
        ({"jobs": {"student": "50%"}}, GPUS, 2, f"{HALF} 2"),
        (
            {"jobs": {"student": "50%"}, "cluster": {"gpu": 4}},
            GPUS,
            0,
            f"{HALF} 1, and its minimum is 2: it waits until there is more",
        ),
        (
            {"jobs": {"student": 1}},
            msgspec.structs.replace(GPUS, resumes=False),
            2,
            "window 'night' has 1 for it, and its minimum is 2, which it keeps: it could not resume",
        ),
        ({}, GPUS, 4, "window 'night' has no size for it but what training may use, which is 4"),
        (
            {"cluster": {"cpu": "20%"}},
            GPUS,
            3,
            "window 'night' has no size for it but what training may use, which is 3",
        ),
        (
            {},
            msgspec.structs.replace(GPUS, resources={}),
            6,
            "window 'night' has no size for it but what training may use, and its maximum is 6",
        ),
        ({"pools": {"student": 2}}, GPUS, 4, "window 'night' has no size for it but what training may use, which is 4"),
    ],
)
def test_how_many_a_window_has(sizes: dict[str, Any], scaling: Scaling, instances: int, reason: str) -> None:
    """Of a cluster of 8 GPUs and 16 cores, within the job's bounds, or none for now."""
    found = to_windows({"default": sizes}).at(datetime.now(UTC)).sizes
    room = capacity_in_window(found, {"gpu": 8.0, "cpu": 16.0}, {})
    assert target_in_window("night", found, STUDENT, scaling, room) == (instances, reason)
    if not scaling.resumes:  # but who is suspended already has nothing to lose
        assert target_in_window("night", found, LEFT, scaling, room).instances == 0


def test_the_runs_window_says_how_many(
    context: Any, site: FakeClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log and result say why, also after it was deferred; a share is one of all nodes."""
    site.backend.jobs = {"student": STUDENT}
    deferred = deferred_by(rendered(resize(), {**context, **NIGHT_RUN}), {**context, **NIGHT_RUN})
    assert site.backend.calls == [("resize to 2", "student")]
    why = f"{HALF} 2"
    assert f"Requested 2 instances of 'student': {why}" in capsys.readouterr().out
    event = event_of(
        deferred, TaskOutcome(ended="ready", name="student", training=TrainingStatus(members=(0, 1)), reason=why)
    )
    result = {"job": "student", "instances": 2, "reason": why}
    assert resize().execute_complete(context, json.loads(json.dumps(event))) == result
    site.trainings["student"] = TrainingStatus(members=(0, 1))
    assert resize().execute({**context, **NIGHT_RUN}) == result
    assert resize(wait=False).execute({**context, **NIGHT_RUN}) == result
    monkeypatch.setattr(
        "edl_airflow.operators.resize.window_for_run", lambda windows, _: windows.at(NIGHT_RUN["data_interval_end"])
    )
    site.backend.jobs = {"student": LEFT}
    assert resize().execute(context)["reason"].startswith("window 'day' has 1 for it, and its minimum is 2")


def test_a_window_can_be_named(context: Any, site: FakeClient) -> None:
    """By night, too, the day's; also by a template, of windows in a Variable."""
    site.backend.jobs = {"digits": POOL}
    given: dict[str, Any] = {"job": None, "teacher_pool": "digits", "window": "{{ 'day' }}"}
    operator = rendered(resize(**given), {**context, **NIGHT_RUN})
    reason = "window 'day' has 0 for it, and its minimum is 2: it waits until there is more"
    assert operator.execute({**context, **NIGHT_RUN}) == {"pool": "digits", "teachers": [], "reason": reason}
    assert site.backend.calls == [("resize to 0", "digits")]


def test_windows_in_a_variable_are_read_when_the_task_runs(
    context: Any, site: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes in it are the task's, which changes nothing and is not tried again."""
    site.backend.jobs, site.trainings = {"student": STUDENT}, {"student": TrainingStatus(members=(0, 1, 2))}
    monkeypatch.setenv("AIRFLOW_VAR_TRAFFIC", "windows: []\ndefault: {jobs: {student: 3}}")
    for name, expected in (("none", "Variable 'none', name"), ("traffic", "window: got 'night', allowed is one of")):
        with pytest.raises(AirflowFailException, match=expected):
            resize(windows=f"variable:{name}", window="night").execute(context)
    assert site.backend.calls == []
    assert resize(windows="variable:traffic").execute(context)["instances"] == 3


def test_what_has_ended_is_not_resized(context: Any, site: FakeClient) -> None:
    """The task is skipped; a name that there never was is an error."""
    site.backend.jobs = {"student": msgspec.structs.replace(STUDENT, phase="succeeded", scaling=None)}
    with pytest.raises(AirflowSkipException, match="trained all"):
        resize().execute(context)
    with pytest.raises(UnknownJobError):
        resize(job="stodent").execute(context)
    assert site.backend.calls == []


SHARES = load_windows(
    {
        "windows": [
            {"name": "day", "start": "07:00", "end": "22:00", "sizes": {"cluster": {"gpu": 2}}},
            {"name": "night", "start": "22:00", "end": "07:00", "sizes": {"cluster": {"gpu": "75%"}}},
        ]
    }
)
NOON, EVENING = datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp(), datetime(2026, 1, 1, 22, tzinfo=UTC).timestamp()
NIGHT_NOW = {
    "window": "night",
    "start": "2026-01-01T22:00:00+00:00",
    "end": "2026-01-02T07:00:00+00:00",
    "sizes": {"cluster": {"gpu": "75%"}},
}
WAIT = TrafficCondition(windows=SHARES, window="night", until=1e12, wait_timeout_s=60)
ROOM = TrafficCondition(windows=SHARES, at_least={"gpu": 6}, total={"gpu": 8}, until=1e12, wait_timeout_s=60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the time in workers and triggerers; what sleeps there sleeps no longer than a moment."""

    def is_at(now: float) -> None:
        monkeypatch.setattr("edl_airflow.waits.clock", lambda: now)

    return is_at


def view_of(wait: TrafficCondition, now: float) -> TrafficObservation:
    """What is observed then."""
    return asyncio.run(wait.observe(None, now))


def wait_for_night(**changes: Any) -> EdlTrafficSensor:
    given = {"task_id": "wait", "windows": SHARES, "window": "night", "deferrable": True, **changes}
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
def test_what_is_waited_for(wait: TrafficCondition, now: float, ended: str | None) -> None:
    """The window, or room enough; what no window has is not waited for."""
    outcome = evaluate(wait, view_of(wait, now), now)
    assert (outcome.ended if outcome else None) == ended


def test_the_error_names_what_is_missing() -> None:
    """When the time is up, or when it never comes."""
    late = evaluate(msgspec.structs.replace(WAIT, until=NOON), view_of(WAIT, NOON), NOON)
    assert late
    assert (late.name, late.reason) == ("window 'night'", "'day' holds until 2026-01-01T22:00:00+00:00")
    never = evaluate(msgspec.structs.replace(ROOM, at_least={"gpu": 7}), view_of(ROOM, NOON), NOON)
    assert never
    assert never.name == "a window with at least 7 gpu"
    assert never.reason == "no window is that: day (at most 2 gpu), night (at most 75% of gpu); of 8 gpu"
    always = load_windows({"windows": [{"name": "on", "start": "00:00", "end": "24:00", "sizes": {}}], "default": {}})
    wait = msgspec.structs.replace(WAIT, windows=always, window="default")
    stuck = evaluate(wait, view_of(wait, NOON), NOON)
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
    assert wait.pause_s(view_of(wait, now), now) == pytest.approx(pause_s)


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

    monkeypatch.setattr("edl_airflow.waits.clock", lambda: now)
    monkeypatch.setattr("asyncio.sleep", sleep)
    (event,) = [event async for event in EdlConditionTrigger.of(WAIT).run()]
    assert (event.payload["ended"], event.payload["window"]) == ("ready", NIGHT_NOW)
    assert slept == [60, 60, 60, 30, 60, 50]
    assert now == EVENING


def test_the_trigger_survives_its_way_to_the_triggerer() -> None:
    """JSON and back is the same wait, in the same order in every process."""
    windows = load_windows({**windows_to_data(SHARES), "holidays": ["2026-01-02", "2026-01-01"]})
    wait = msgspec.structs.replace(ROOM, windows=windows)
    path, kwargs = EdlConditionTrigger.of(wait).serialize()
    assert path == "edl_airflow.triggers.task.EdlConditionTrigger"
    again = EdlConditionTrigger(**json.loads(json.dumps(kwargs)))
    assert again.condition == wait
    assert again.serialize() == (path, kwargs)


def test_the_sensor_looks_once_and_defers(context: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no connection; a fresh one returns the window."""
    monkeypatch.delenv("AIRFLOW_CONN_EDL_DEFAULT")
    clock(NOON)
    deferred = deferred_by(rendered(wait_for_night(window="{{ 'night' }}"), context), context)
    assert deferred.trigger.condition.window == "night"
    clock(EVENING)
    assert wait_for_night().execute(context) == NIGHT_NOW
    assert wait_for_night(deferrable=False).execute(context) == NIGHT_NOW
    event = event_of(deferred, TaskOutcome(ended="ready", name="night", window=NIGHT_NOW))
    assert wait_for_night().execute_complete(context, json.loads(json.dumps(event))) == NIGHT_NOW


def test_the_log_says_what_is_waited_for(context: Any, clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Before hours of sleep, and once, however often it is looked."""
    clock(NOON)
    deferred_by(wait_for_night(), context)
    logged = "Waiting for \"window 'night'\": 'day' holds until 2026-01-01T22:00:00+00:00"
    assert logged in capsys.readouterr().out
    looks = wait_for_night(deferrable=False)
    assert not looks.poke(context)
    assert not looks.poke(context)
    assert capsys.readouterr().out.count(logged) == 1


def test_a_wait_for_room_is_of_what_the_cluster_has(context: Any, clock: Any, site: FakeClient) -> None:
    """All nodes together; what no window leaves is not waited for, nor what there is none of."""
    clock(NOON)
    deferred = deferred_by(rendered(wait_for_night(window=None, at_least={"gpu": "{{ 6 }}"}), context), context)
    wait = deferred.trigger.condition
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
    monkeypatch.setenv("AIRFLOW_VAR_TRAFFIC", json.dumps(windows_to_data(SHARES)))
    clock(EVENING)
    assert sensor.execute(context) == NIGHT_NOW
    with pytest.raises(AirflowFailException, match="window: got 'nihgt', allowed is one of 'day', 'night'"):
        wait_for_night(windows="variable:traffic", window="nihgt").execute(context)
