"""The sensor and the resize: what they wait for, and when they stop waiting."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException
from support.airflow.fakes import MadeUpSite, deferred_by, event_of, failed_status, job_status, rendered

from edl_airflow.failures import GoneError
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.sensors.teacher_pool import EdlTeacherPoolSensor
from edl_airflow.work import Outcome
from edl_runtime.errors import UnknownJobError


def _grow(**changes: Any) -> EdlResizeOperator:
    return EdlResizeOperator(**{"task_id": "grow", "teacher_pool": "digits", "instances": 2, **changes})


@pytest.mark.parametrize("deferrable", [False, True])
def test_a_pool_that_has_ended_is_not_resized(context: Any, site: MadeUpSite, deferrable: bool) -> None:  # noqa: FBT001
    """The task is skipped; a name that no pool ever had is a mistake."""
    site.backend.ended = {"digits"}
    with pytest.raises(AirflowSkipException, match="'digits' has ended"):
        _grow(deferrable=deferrable).execute(context)
    with pytest.raises(UnknownJobError):
        _grow(deferrable=deferrable, teacher_pool="dogits").execute(context)


def test_a_pool_that_ends_while_it_grows_is_no_failure(context: Any, site: MadeUpSite) -> None:
    """The second half skips the task as well."""
    site.backend.jobs = {"digits": job_status("digits", kind="pool")}
    late = event_of(
        deferred_by(_grow(deferrable=True), context), Outcome(ended="gone", name="digits", reason="it is no more")
    )
    with pytest.raises(AirflowSkipException, match="'digits' has ended"):
        _grow().execute_complete(context, late)


def test_a_silent_redis_defers_too(context: Any, site: MadeUpSite) -> None:
    """The triggerer waits for it; the new size is recorded at once."""
    site.backend.jobs, site.away = {"digits": job_status("digits", kind="pool")}, True
    deferred_by(_grow(deferrable=True), context)
    assert ("resize to 2", "digits") in site.backend.deeds
    deferred_by(EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits", deferrable=True), context)
    assert not EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits").poke(context).is_done


def test_waits_heed_the_tasks_time(context: Any, site: MadeUpSite) -> None:
    """Airflow forgets `execution_timeout` on deferral, so the wait carries it."""
    site.backend.jobs = {"digits": job_status("digits", kind="pool")}
    sensor = EdlTeacherPoolSensor(
        task_id="wait", teacher_pool="digits", deferrable=True, execution_timeout=timedelta(seconds=9)
    )
    for operator in (sensor, _grow(deferrable=True, execution_timeout=timedelta(seconds=9))):
        before = time.time()
        wait = deferred_by(operator, context).trigger.serialize()[1]["wait"]
        assert before <= wait["deadline"] - 9 <= time.time()


@pytest.mark.parametrize("deferrable", [False, True])
@pytest.mark.parametrize("lenient", [{}, {"soft_fail": True}, {"never_fail": True}])
def test_what_can_not_come_any_more_fails_the_sensor_or_skips_it(
    context: Any,
    site: MadeUpSite,
    lenient: dict[str, bool],
    deferrable: bool,  # noqa: FBT001
) -> None:
    """At the first look, at a later one, and in the triggerer."""
    given: dict[str, Any] = {"task_id": "wait", "teacher_pool": "digits", "poke_interval": 0.01, "timeout": 100}
    sensor = EdlTeacherPoolSensor(**given, deferrable=deferrable, **lenient)
    site.backend.jobs = {"digits": failed_status("digits", 78, "no such model")}
    with pytest.raises(AirflowSkipException if lenient else AirflowFailException, match=r"no such model|_fail"):
        sensor.execute(context)
    site.backend.jobs = {"digits": job_status("digits", kind="pool")}
    if deferrable:
        ended = Outcome(ended="gone", name="digits", reason="it is no more")
        event = {"event": event_of(deferred_by(sensor, context), ended)}
        go_on = partial(sensor.resume_execution, "execute_complete", event, context)
    else:
        site.backend.forget_after("digits", looks=2)
        go_on = partial(sensor.execute, context)
    with pytest.raises(AirflowSkipException if lenient else GoneError, match=r"'digits' has ended|_fail"):
        go_on()


def test_the_sensor_looks_once_and_defers(context: Any, site: MadeUpSite) -> None:
    """Then it needs no worker until the pool is there, or its time is up."""
    sensor = EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits", at_least="{{ params.high }}", deferrable=True)
    deferred = deferred_by(rendered(sensor, context), context)
    assert deferred.trigger.serialize()[1]["wait"]["at_least"] == 3
    site.registered = ["a", "b", "c"]
    assert sensor.execute(context) == {"pool": "digits", "teachers": ["a", "b", "c"]}
    late = event_of(deferred, Outcome(ended="no_teacher", name="digits"))
    with pytest.raises(AirflowSensorTimeout, match="digits"):
        EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits").execute_complete(context, late)
