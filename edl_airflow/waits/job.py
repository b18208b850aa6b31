"""Waits until so many instances of a job train together, or until it has succeeded."""

from __future__ import annotations

from typing import Literal, Self, get_args

import msgspec

from edl_airflow.client import EdlClient, job_status
from edl_airflow.runtime.decisions import FINISHED_REASON, failed_outcome, outcome_from_registry
from edl_airflow.runtime.spec import TaskOutcome, TrainingStatus
from edl_airflow.waits.base import Condition
from edl_runtime.backends.interface import JobStatus
from edl_runtime.store.errors import RegistryUnavailableError

JobPhase = Literal["running", "succeeded"]
PHASES: tuple[JobPhase, ...] = get_args(JobPhase)

NOT_ELASTIC = (
    "it is no job of elastic trainers, so nobody can tell how many of its instances train together; "
    "EdlTrainOperator starts such jobs, and so does EdlDistillOperator with `students`"
)


class JobObservation(msgspec.Struct, frozen=True, kw_only=True):
    """What there is now. `job` is None while the backend knows none, `training` while its agents are not there.

    `trouble`: why Redis could not be asked, in words; empty if it could.
    """

    job: JobStatus | None = None
    training: TrainingStatus | None = None
    trouble: str = ""


class JobCondition(Condition[JobObservation], frozen=True, kw_only=True, tag="job"):
    """A job that is `running` with `at_least` to `at_most` instances (None: any number above), or has `succeeded`.

    An instance counts once it trains: the generation that it is in is up. With 0 the job is suspended: none is left.
    `seen`: the job has been seen, so its absence means that it has ended.
    """

    job: str
    phase: JobPhase = "running"
    at_least: int = 1
    at_most: int | None = None
    seen: bool = False

    @property
    def about(self) -> str:
        return self.job

    async def observe(self, client: EdlClient) -> JobObservation:
        job = await job_status(client.backend, self.job)
        try:
            return JobObservation(job=job, training=await client.training(self.job))
        except RegistryUnavailableError as error:
            return JobObservation(job=job, trouble=str(error))

    def check(self, view: JobObservation) -> TaskOutcome | None:
        job = view.job
        if not job:
            return self._found_removed(view.training)
        if job.phase == "failed":
            return failed_outcome(job)
        if job.phase == "succeeded":
            trained = TaskOutcome(ended="gone", name=self.job, reason=FINISHED_REASON)
            return self.ready(view) if self.phase == "succeeded" else trained
        if self.phase == "succeeded":
            return None
        if not job.elastic:
            return TaskOutcome(ended="impossible", name=self.job, reason=NOT_ELASTIC)
        return self.ready(view) if self._fits(view, job) else None

    def ready(self, view: JobObservation) -> TaskOutcome:
        """Return how the wait ends with the instances that there are."""
        training = None if self.at_most == 0 else view.training
        return TaskOutcome(ended="ready", name=self.job, training=training, reason=self.because)

    def on_timeout(self, view: JobObservation) -> TaskOutcome:
        return TaskOutcome(ended="not_yet", name=self.job, reason=self._lack(view))

    def after(self, view: JobObservation) -> Self:
        return msgspec.structs.replace(self, seen=True) if view.job else self

    def _found_removed(self, training: TrainingStatus | None) -> TaskOutcome | None:
        """Return what is known of a job that its task may have removed: what its agents agreed on stays for a while."""
        if self.phase == "succeeded" and training and training.ended in {"done", "stopped"}:
            return TaskOutcome(ended="ready", name=self.job, training=training)
        if ended := outcome_from_registry(self.job, training, self.began_at):
            return ended
        stopped = TaskOutcome(ended="gone", name=self.job, reason="the job was there, and somebody has stopped it")
        return stopped if self.seen else None

    def _fits(self, view: JobObservation, job: JobStatus) -> bool:
        if self.at_most == 0:  # nobody is left to say so
            return not job.instances
        instances = _training_now(view.training, job)
        return instances >= self.at_least and (self.at_most is None or instances <= self.at_most)

    def _lack(self, view: JobObservation) -> str:
        if view.trouble:
            return "Redis does not answer"
        if not view.job:
            return "there is no such job"
        if self.phase == "succeeded":
            return "it is still running"
        if self.at_most == 0:
            return f"{len(view.job.instances)} instances have yet to leave"
        wanted = f"{self.at_least} or more" if self.at_most is None else f"{self.at_least}"
        return f"{view.training.instances if view.training else 0} instances train together, wanted are {wanted}"


def _training_now(training: TrainingStatus | None, job: JobStatus) -> int:
    """Return how many instances train together; those that did before the job was suspended are known for a while."""
    if not training or job.is_suspended:
        return 0
    resumed = any(instance.started_at > training.heard_at for instance in job.instances)
    return 0 if resumed else training.instances
