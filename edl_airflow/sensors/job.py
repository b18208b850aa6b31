"""Waits for a job's trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import conf

from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.templates import (
    as_count,
    check_connection,
    check_deferrable,
    has_template,
    task_deadline,
)
from edl_airflow.results import RunningJob
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.sensors.base import EdlSensor
from edl_airflow.waits.conditions import PHASES, JobCondition, JobPhase
from edl_runtime.errors import SpecError
from edl_runtime.specs import check_name


class EdlJobSensor(EdlSensor[JobCondition]):
    """Succeed when a job of elastic trainers runs with at least so many instances, or when it has succeeded.

    Returns a `RunningJob`. An instance counts once it trains together with the others. Fails at once when the job has
    failed or was stopped, when it has ended before so many ran, and with phase "running" for a job that is not elastic.
    Of jobs that ended before this DAG run began, a success counts, but not a failure. See `EdlSensor` for what all
    sensors share.

    :param job: the job's name, as given to `EdlTrainOperator`; use another name in each run, because a success is known
        for a day (templated)
    :param phase: "running" or "succeeded"; a job that was asked to end with a checkpoint has succeeded, too
    :param at_least: how many instances must be running (templated)
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    :param deferrable: wait in the triggerer, without a worker slot
    """

    template_fields: Sequence[str] = ("job", "at_least", "edl_conn_id")
    ui_color = "#ead1dc"

    def __init__(
        self,
        *,
        job: str,
        phase: JobPhase = "running",
        at_least: int | str = 1,
        edl_conn_id: str = DEFAULT_CONN_ID,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job = job
        self.phase: JobPhase = phase
        self.at_least = at_least
        self.edl_conn_id = check_connection(edl_conn_id)
        self.deferrable = check_deferrable(deferrable)
        if not has_template(job):
            check_name("job", job)
        if phase not in PHASES:
            raise SpecError("phase", phase, " or ".join(map(repr, PHASES)))
        if not has_template(at_least):
            as_count("at_least", at_least)

    def new_condition(self, until: float) -> JobCondition:
        return JobCondition(
            conn_id=self.edl_conn_id,
            job=check_name("job", self.job),
            phase=self.phase,
            at_least=as_count("at_least", self.at_least),
            wait_timeout_s=self.timeout,
            until=until,
            deadline=task_deadline(self),
        )

    def result(self, outcome: TaskOutcome) -> RunningJob:
        return outcome.running_job()
