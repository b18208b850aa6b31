"""Resizing jobs and pools as traffic windows say."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from support.airflow.fakes import MadeUpSite, deferred_by, event_of, job_status, rendered

from edl_airflow.job_wait import JobView, JobWait
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.pool_wait import PoolView, PoolWait
from edl_airflow.waiting import judge
from edl_airflow.window_size import wanted_in
from edl_airflow.windows import left_to_training
from edl_airflow.work import Outcome, Training
from edl_runtime.autoscale.traffic_schema import to_windows
from edl_runtime.backends.base import InstanceStatus, Scaling
from edl_runtime.errors import UnknownJobError
from edl_runtime.specs import Bounds

WINDOWS: dict[str, Any] = {
    "windows": [
        {"name": "day", "start": "07:00", "end": "22:00", "sizes": {"jobs": {"student": 1}, "pools": {"digits": 0}}},
        {"name": "night", "start": "22:00", "end": "07:00", "sizes": {"jobs": {"student": "50%"}}},
    ]
}
GPUS = Scaling(bounds=Bounds(2, 6), resources={"gpu": 2.0, "cpu": 1.0}, resumes=True)
STUDENT = job_status("student", scaling=GPUS)
POOL = job_status("digits", kind="pool", elastic=False, scaling=GPUS)
NIGHT = {
    "data_interval_start": datetime(2999, 1, 1, 22, tzinfo=UTC),
    "data_interval_end": datetime(2999, 1, 2, 7, tzinfo=UTC),
}
LEFT = msgspec.structs.replace(STUDENT, phase="pending", wanted=0)
LEAVING = msgspec.structs.replace(LEFT, instances=(InstanceStatus(index=0, phase="running", started_at=1.0),))


def resize(**changes: Any) -> EdlResizeOperator:
    given: dict[str, Any] = {"task_id": "resize", "job": "student", "windows": WINDOWS, "deferrable": True}
    return EdlResizeOperator(**{**given, **changes})


HALF = "window 'night' has 50% of what training may use for it, which is"


@pytest.mark.parametrize(
    ("sizes", "scaling", "instances", "reason"),
    [
        ({"jobs": {"student": 3}}, GPUS, 3, "window 'night' has 3 for it"),
        ({"jobs": {"student": 6}}, GPUS, 6, "window 'night' has 6 for it"),
        ({"jobs": {"student": 9}}, GPUS, 6, "window 'night' has 9 for it, and its most is 6"),
        ({"jobs": {"student": "50%"}}, GPUS, 2, f"{HALF} 2"),
        (
            {"jobs": {"student": "50%"}, "cluster": {"gpu": 4}},
            GPUS,
            0,
            f"{HALF} 1, and its least is 2: it waits until there is more",
        ),
        (
            {"jobs": {"student": 1}},
            msgspec.structs.replace(GPUS, resumes=False),
            2,
            "window 'night' has 1 for it, and its least is 2, which it keeps: it would not go on where it was",
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
            "window 'night' has no size for it but what training may use, and its most is 6",
        ),
        ({"pools": {"student": 2}}, GPUS, 4, "window 'night' has no size for it but what training may use, which is 4"),
    ],
)
def test_how_many_a_window_has(sizes: dict[str, Any], scaling: Scaling, instances: int, reason: str) -> None:
    """Of a cluster of 8 GPUs and 16 cores, within the job's bounds, or none for now."""
    found = to_windows({"default": sizes}).sizes_at(datetime.now(UTC))
    room = left_to_training(found, {"gpu": 8.0, "cpu": 16.0}, {})
    assert wanted_in("night", found, STUDENT, scaling, room) == (instances, reason)


def test_what_is_suspended_is_not_resumed_below_its_minimum() -> None:
    """Though it would not go on where it was: it has nothing to lose any more."""
    found = to_windows({"default": {"jobs": {"student": 1}}}).sizes_at(datetime.now(UTC))
    assert wanted_in("night", found, LEFT, msgspec.structs.replace(GPUS, resumes=False), {}).instances == 0


def test_the_runs_window_says_how_many(
    context: Any, site: MadeUpSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log and result say why, also after it was deferred; a share is one of all nodes."""
    site.backend.jobs = {"student": STUDENT}
    deferred = deferred_by(rendered(resize(), {**context, **NIGHT}), {**context, **NIGHT})
    assert site.backend.deeds == [("resize to 2", "student")]
    why = f"{HALF} 2"
    assert f"'student' shall have 2 instances: {why}" in capsys.readouterr().out
    event = event_of(deferred, Outcome(ended="ready", name="student", training=Training(members=(0, 1)), reason=why))
    result = {"job": "student", "instances": 2, "reason": why}
    assert resize().execute_complete(context, json.loads(json.dumps(event))) == result
    site.trainings["student"] = Training(members=(0, 1))
    assert resize().execute({**context, **NIGHT}) == result
    assert resize(wait=False).execute({**context, **NIGHT}) == result
    monkeypatch.setattr(
        "edl_airflow.operators.resize.window_of", lambda windows, _: windows.at(NIGHT["data_interval_end"])
    )
    site.backend.jobs = {"student": LEFT}
    assert resize().execute(context)["reason"].startswith("window 'day' has 1 for it, and its least is 2")


def test_a_window_can_be_named(context: Any, site: MadeUpSite) -> None:
    """By night, too, the day's; also by a template, of windows in a Variable."""
    site.backend.jobs = {"digits": POOL}
    given: dict[str, Any] = {"job": None, "teacher_pool": "digits", "window": "{{ 'day' }}"}
    operator = rendered(resize(**given), {**context, **NIGHT})
    reason = "window 'day' has 0 for it, and its least is 2: it waits until there is more"
    assert operator.execute({**context, **NIGHT}) == {"pool": "digits", "teachers": [], "reason": reason}
    assert site.backend.deeds == [("resize to 0", "digits")]


def test_windows_in_a_variable_are_read_when_the_task_runs(
    context: Any, site: MadeUpSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes in it are the task's, which changes nothing and is not tried again."""
    site.backend.jobs, site.trainings = {"student": STUDENT}, {"student": Training(members=(0, 1, 2))}
    monkeypatch.setenv("AIRFLOW_VAR_TRAFFIC", "windows: []\ndefault: {jobs: {student: 3}}")
    for name, words in (("none", "Variable 'none', name"), ("traffic", "window: got 'night', allowed is one of")):
        with pytest.raises(AirflowFailException, match=words):
            resize(windows=f"variable:{name}", window="night").execute(context)
    assert site.backend.deeds == []
    assert resize(windows="variable:traffic").execute(context)["instances"] == 3


def test_what_has_ended_is_not_resized(context: Any, site: MadeUpSite) -> None:
    """The task is skipped; a name that there never was is an error."""
    site.backend.jobs = {"student": msgspec.structs.replace(STUDENT, phase="succeeded", scaling=None)}
    with pytest.raises(AirflowSkipException, match="trained all"):
        resize().execute(context)
    with pytest.raises(UnknownJobError):
        resize(job="stodent").execute(context)
    assert site.backend.deeds == []


NOBODY = JobWait(conn_id="c", until=10, waits_s=10, job="student", at_least=0, at_most=0, seen=True)


@pytest.mark.parametrize(
    ("view", "now", "ended"),
    [
        (JobView(job=LEAVING, training=Training(members=(0,))), 5, None),
        (JobView(job=LEFT, training=Training(members=(0,))), 5, "ready"),  # the last that trained are known still
        (JobView(job=LEFT), 5, "ready"),
        (JobView(job=LEFT, trouble="away"), 5, "ready"),
        (JobView(job=LEAVING), 10, "not_yet"),
        (JobView(), 5, "gone"),
    ],
)
def test_a_suspended_job_has_no_instances(view: JobView, now: float, ended: str | None) -> None:
    """It is waited for until the last has left."""
    outcome = judge(NOBODY, view, now)
    assert (outcome.ended if outcome else None) == ended
    assert not outcome or outcome.ended != "ready" or outcome.running_job() == {"job": "student", "instances": 0}
    assert not outcome or outcome.ended != "not_yet" or outcome.reason == "1 instances have yet to leave"


def test_a_suspended_pool_has_no_teachers() -> None:
    """It is waited for until the last is unregistered."""
    wait = PoolWait(conn_id="c", until=10, waits_s=10, pool="digits", at_least=0, at_most=0, seen=True)
    pool = msgspec.structs.replace(POOL, phase="pending", wanted=0)
    assert judge(wait, PoolView(pool=pool, teachers=("a:1",)), 5) is None
    outcome = judge(wait, PoolView(pool=pool), 5)
    assert outcome
    assert outcome.ended == "ready"
