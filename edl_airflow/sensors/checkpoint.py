"""Waits for a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import conf

from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.templates import (
    as_count,
    check_connection,
    check_deferrable,
    check_stream,
    has_template,
    task_deadline,
)
from edl_airflow.results import CheckpointResult
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.sensors.base import EdlSensor
from edl_airflow.waits.checkpoint import CheckpointCondition, Threshold
from edl_runtime.errors import SpecError
from edl_runtime.specs import check_name


class EdlCheckpointSensor(EdlSensor[CheckpointCondition]):
    """Succeed when there is a checkpoint that meets all the given criteria; return the newest one.

    Returns a `CheckpointResult`. Earlier checkpoints count, also those of earlier runs, unless `job` or `max_age`
    excludes them; it does not check whether they still exist. With a `job`, the sensor fails at once when that job has
    ended, since the start of this DAG run, without such a checkpoint. See `EdlSensor` for what all sensors share.

    :param stream: the stream of checkpoints: "DAG/TASK" of an `EdlTrainOperator` ("DAG/TASK/0" of a mapped one), or the
        name of a job that was started by hand (templated)
    :param job: the name of the job that writes it, None for any (templated)
    :param step: the least step (templated)
    :param epoch: the least epoch (templated)
    :param metric: a metric that the script gave to `run.metrics`, with >=, <=, > or <, as in "accuracy>=0.9"
        (templated)
    :param max_age: the greatest age, as a timedelta or in seconds
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    :param deferrable: wait in the triggerer, without a worker slot
    """

    template_fields: Sequence[str] = ("stream", "job", "step", "epoch", "metric", "edl_conn_id")
    ui_color = "#ead1dc"

    def __init__(
        self,
        *,
        stream: str,
        job: str | None = None,
        step: int | str | None = None,
        epoch: int | str | None = None,
        metric: str | None = None,
        max_age: timedelta | float | None = None,
        edl_conn_id: str = DEFAULT_CONN_ID,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.stream = stream
        self.job = job
        self.step = step
        self.epoch = epoch
        self.metric = metric
        self.max_age = max_age
        self.edl_conn_id = check_connection(edl_conn_id)
        self.deferrable = check_deferrable(deferrable)
        if not has_template(stream):
            check_stream(stream)
        if job is not None and not has_template(job):
            check_name("job", job)
        for field, value in (("step", step), ("epoch", epoch)):
            if value is not None and not has_template(value):
                as_count(field, value)
        if metric is not None and not has_template(metric):
            Threshold.parse(metric)
        _seconds(max_age)

    def new_condition(self, until: float) -> CheckpointCondition:
        return CheckpointCondition(
            conn_id=self.edl_conn_id,
            stream=check_stream(self.stream),
            job=check_name("job", self.job) if self.job is not None else "",
            step=as_count("step", self.step) if self.step is not None else 0,
            epoch=as_count("epoch", self.epoch) if self.epoch is not None else 0,
            threshold=Threshold.parse(self.metric) if self.metric is not None else None,
            max_age_s=_seconds(self.max_age),
            wait_timeout_s=self.timeout,
            until=until,
            deadline=task_deadline(self),
        )

    def result(self, outcome: TaskOutcome) -> CheckpointResult:
        assert outcome.landed is not None  # noqa: S101 (the condition is true)
        return outcome.landed


def _seconds(max_age: timedelta | float | None) -> float | None:
    if max_age is None:
        return None
    seconds = max_age.total_seconds() if isinstance(max_age, timedelta) else max_age
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise SpecError("max_age", max_age, "a timedelta or a number of seconds above 0")
    return float(seconds)
