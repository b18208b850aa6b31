"""Waits for a checkpoint that meets criteria."""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable
from typing import Self

import msgspec

from edl_airflow.client import EdlClient, job_status
from edl_airflow.results import CheckpointResult
from edl_airflow.runtime.decisions import failed_outcome, outcome_from_registry
from edl_airflow.runtime.spec import TaskOutcome, TrainingStatus
from edl_airflow.waits.conditions import Condition, Observation
from edl_runtime.backends.interface import JobStatus
from edl_runtime.errors import SpecError
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
    def parse(cls, text: str) -> Self:
        """Read a name, one of >= <= > <, and a number. Raises SpecError that names the field `metric`."""
        found = _METRIC.fullmatch(text)
        try:
            return cls(found[1], found[2], float(found[3]))  # type: ignore[index]
        except (TypeError, ValueError):
            raise SpecError("metric", text, "a metric's name, >=, <=, > or <, and a number: 'accuracy>=0.9'") from None

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

    landed: tuple[CheckpointResult, ...] = ()
    last_id: str = ""
    job: JobStatus | None = None
    training: TrainingStatus | None = None
    at: float = 0.0


class CheckpointCondition(Condition[CheckpointObservation], frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint in `stream`, of `job` if one is named, that meets all of these.

    - `step`, `epoch`: the least, 0 for any.
    - `threshold`: of a metric, None for any.
    - `max_age_s`: the greatest age, None for any.
    - `last_id`: the last checkpoint that was checked; empty for none.
    - `seen`: the job has been seen, so its absence means that it has ended.
    """

    stream: str
    job: str = ""
    step: int = 0
    epoch: int = 0
    threshold: Threshold | None = None
    max_age_s: float | None = None
    last_id: str = ""
    seen: bool = False

    @property
    def about(self) -> str:
        return self.stream

    async def observe(self, client: EdlClient) -> CheckpointObservation:
        job = await job_status(client.backend, self.job) if self.job else None
        at = time.time()
        try:
            training = await client.training(self.job) if self.job and not job else None
            landed = await client.next_checkpoints(self.stream, self.last_id, block_ms=0)
        except RegistryUnavailableError as error:
            return CheckpointObservation(job=job, last_id=self.last_id, trouble=str(error), at=at)
        last_id = landed[-1][0] if landed else self.last_id
        found = tuple(checkpoint for _, checkpoint in landed if checkpoint)
        return CheckpointObservation(job=job, training=training, landed=found, last_id=last_id, at=at)

    def check(self, view: CheckpointObservation) -> TaskOutcome | None:
        fitting = [checkpoint for checkpoint in view.landed if self._fits(checkpoint, view.at)]
        if fitting:
            return TaskOutcome(ended="ready", name=self.stream, landed=fitting[-1])
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

    def on_timeout(self, view: CheckpointObservation) -> TaskOutcome:
        missing = "Redis does not answer" if view.trouble else f"no checkpoint has {self._wanted()}"
        return TaskOutcome(ended="not_yet", name=self.stream, reason=missing)

    def after(self, view: CheckpointObservation) -> Self:
        return msgspec.structs.replace(self, last_id=view.last_id, seen=self.seen or view.job is not None)

    def _fits(self, checkpoint: CheckpointResult, now: float) -> bool:
        return (
            (not self.job or checkpoint["job"] == self.job)
            and checkpoint["step"] >= self.step
            and checkpoint["epoch"] >= self.epoch
            and (self.threshold is None or self.threshold.holds(checkpoint["metrics"]))
            and (self.max_age_s is None or checkpoint["at"] >= now - self.max_age_s)
        )

    def _wanted(self) -> str:
        criteria = [
            f"step {self.step} or later" if self.step else "",
            f"epoch {self.epoch} or later" if self.epoch else "",
            str(self.threshold) if self.threshold else "",
            f"an age of at most {self.max_age_s:.0f} s" if self.max_age_s is not None else "",
        ]
        return ", ".join(filter(None, criteria)) or "landed"
