"""Waits for a checkpoint that meets criteria."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Self

import msgspec
from airflow.sdk import conf

from edl_airflow.client import EdlClient, job_status
from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.templates import (
    Arguments,
    Maybe,
    as_count,
    check_connection,
    check_deferrable,
    check_stream,
)
from edl_airflow.results import CheckpointResult
from edl_airflow.runtime.decisions import failed_outcome, outcome_from_registry
from edl_airflow.runtime.spec import TaskOutcome, TrainingStatus
from edl_airflow.sensors.base import EdlSensor
from edl_airflow.waits import Condition, Observation, outage
from edl_runtime.errors import SpecError
from edl_runtime.specs import check_name
from edl_runtime.store.errors import RegistryUnavailableError

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_METRIC = re.compile(r"\s*([\w./-]+)\s*(>=|<=|>|<)\s*([-+.\deE]+)\s*")


class Threshold(msgspec.Struct, frozen=True):
    """A limit for a checkpoint's metric, as "accuracy>=0.9". A missing metric, or NaN, does not meet it."""

    metric: str
    compare: str
    bound: float

    @classmethod
    def parse(cls, field: str, text: str) -> Self:
        """Read a name, one of >= <= > <, and a number. Raises SpecError that names `field`."""
        try:
            found = _METRIC.fullmatch(text)
            return cls(found[1], found[2], float(found[3]))  # type: ignore[index]
        except (TypeError, ValueError):
            raise SpecError(field, text, "a metric's name, >=, <=, > or <, and a number: 'accuracy>=0.9'") from None

    def __str__(self) -> str:
        return f"{self.metric} {self.compare} {self.bound:g}"

    def holds(self, metrics: dict[str, float]) -> bool:
        """Whether these metrics meet it."""
        value = metrics.get(self.metric)
        return value is not None and _COMPARE[self.compare](value, self.bound)


class CheckpointObservation(Observation, frozen=True, kw_only=True):
    """The checkpoints since the last observation, up to the id `last_id`, oldest first; and the job, if one was named.

    `training`: what its agents left in Redis, if the backend does not know the job any more.
    """

    saved: tuple[CheckpointResult, ...] = ()
    last_id: str = ""
    training: TrainingStatus | None = None
    at: float = 0.0


class CheckpointCondition(Condition[CheckpointObservation], frozen=True, kw_only=True):
    """A checkpoint in `stream`, of `job` if one is named, that meets all of these.

    - `step`, `epoch`: the least, 0 for any.
    - `metric`: a limit of a metric, None for any.
    - `max_age`: the greatest age in seconds, None for any.
    - `last_id`: the last checkpoint that was checked; empty for none.
    """

    stream: str
    job: str = ""
    step: int = 0
    epoch: int = 0
    metric: Threshold | None = None
    max_age: float | None = None
    last_id: str = ""

    @property
    def about(self) -> str:
        return self.stream

    async def observe(self, client: EdlClient, now: float) -> CheckpointObservation:
        job = await job_status(client.backend, self.job) if self.job else None
        try:
            training = await client.training(self.job) if self.job and not job else None
            saved = await client.next_checkpoints(self.stream, self.last_id, block_ms=0)
        except RegistryUnavailableError as error:
            return CheckpointObservation(job=job, last_id=self.last_id, trouble=outage(error), at=now)
        last_id = saved[-1][0] if saved else self.last_id
        found = tuple(checkpoint for _, checkpoint in saved if checkpoint)
        return CheckpointObservation(job=job, training=training, saved=found, last_id=last_id, at=now)

    def check(self, view: CheckpointObservation) -> TaskOutcome | None:
        fitting = [checkpoint for checkpoint in view.saved if self._fits(checkpoint, view.at)]
        if fitting:
            return TaskOutcome(ended="ready", name=self.stream, checkpoint=fitting[-1])
        if not self.job or view.trouble:
            return None
        if view.job and view.job.phase == "failed":
            return failed_outcome(view.job)
        unseen = None if view.job else outcome_from_registry(self.job, view.training, self.began_at)
        if unseen and unseen.ended == "failed":
            return unseen
        if unseen or (self.seen and not view.job) or (view.job and view.job.phase == "succeeded"):
            reason = f"the job has ended, and no checkpoint of it has {self._wanted()}"
            return TaskOutcome(ended="gone", name=self.job, reason=reason)
        return None

    def missing(self, view: CheckpointObservation) -> str:  # noqa: ARG002 (it is the same for all)
        return f"no checkpoint has {self._wanted()}"

    def after(self, view: CheckpointObservation) -> Self:
        return msgspec.structs.replace(self, last_id=view.last_id, seen=self.seen or view.job is not None)

    def _fits(self, checkpoint: CheckpointResult, now: float) -> bool:
        return (
            (not self.job or checkpoint["job"] == self.job)
            and checkpoint["step"] >= self.step
            and checkpoint["epoch"] >= self.epoch
            and (self.metric is None or self.metric.holds(checkpoint["metrics"]))
            and (self.max_age is None or checkpoint["at"] >= now - self.max_age)
        )

    def _wanted(self) -> str:
        criteria = [
            f"step {self.step} or later" if self.step else "",
            f"epoch {self.epoch} or later" if self.epoch else "",
            str(self.metric) if self.metric else "",
            f"an age of at most {self.max_age:.0f} s" if self.max_age is not None else "",
        ]
        return ", ".join(filter(None, criteria)) or "been saved"


def as_age(field: str, age: object) -> float:
    """Return an age in seconds. Raises SpecError."""
    seconds = age.total_seconds() if isinstance(age, timedelta) else age
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise SpecError(field, age, "a timedelta or a number of seconds above 0")
    return float(seconds)


class EdlCheckpointSensor(EdlSensor):
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
    arguments: ClassVar[Arguments] = {
        "stream": check_stream,
        "job": Maybe(check_name),
        "step": Maybe(as_count),
        "epoch": Maybe(as_count),
        "metric": Maybe(Threshold.parse),
        "max_age": Maybe(as_age),
    }
    condition = CheckpointCondition

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
        self.check_arguments()

    def result(self, outcome: TaskOutcome) -> CheckpointResult:
        assert outcome.checkpoint is not None  # noqa: S101 (the condition is true)
        return outcome.checkpoint
