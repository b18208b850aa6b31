"""Waits for a job's trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

from airflow.sdk import conf

from edl_airflow.client import EdlClient, job_status
from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.templates import Arguments, as_count, check_connection, check_deferrable
from edl_airflow.results import RunningJob
from edl_airflow.runtime.decisions import FINISHED_REASON, failed_outcome, outcome_from_registry
from edl_airflow.runtime.spec import TaskOutcome, TrainingStatus
from edl_airflow.sensors.base import EdlSensor
from edl_airflow.waits import Condition, Observation, count_text, outage
from edl_runtime.backends.interface import JobStatus
from edl_runtime.errors import SpecError, counted
from edl_runtime.specs import check_name
from edl_runtime.store.errors import RegistryUnavailableError

JobPhase = Literal["running", "succeeded"]

NOT_ELASTIC = (
    "it is not a job of elastic trainers, so it does not report how many of its instances train together; "
    "EdlTrainOperator starts such jobs, and so does EdlDistillOperator with `students`"
)


class JobObservation(Observation, frozen=True, kw_only=True):
    """`training` is None until the job's agents have registered."""

    training: TrainingStatus | None = None


class JobCondition(Condition[JobObservation], frozen=True, kw_only=True):
    """A job that is `running` with `at_least` to `at_most` instances (None: no limit), or has `succeeded`.

    An instance counts once its generation trains. `at_most` 0 is a suspended job without instances.
    """

    job: str
    phase: JobPhase = "running"
    at_least: int = 1
    at_most: int | None = None

    @property
    def about(self) -> str:
        return self.job

    async def observe(self, client: EdlClient, now: float) -> JobObservation:  # noqa: ARG002 (not by the clock)
        job = await job_status(client.backend, self.job)
        try:
            return JobObservation(job=job, training=await client.training(self.job))
        except RegistryUnavailableError as error:
            return JobObservation(job=job, trouble=outage(error))

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
        """Return the outcome with the current instances."""
        training = None if self.at_most == 0 else view.training
        return TaskOutcome(ended="ready", name=self.job, training=training, reason=self.because)

    def missing(self, view: JobObservation) -> str:
        if not view.job:
            return "there is no such job"
        if self.phase == "succeeded":
            return "it is still running"
        if self.at_most == 0:
            return f"it waits for {counted(len(view.job.instances), 'instance')} to leave"
        wanted = count_text(self.at_least, self.at_most)
        present = counted(view.training.instances if view.training else 0, "instance")
        return f"it trains with {present}, required: {wanted}"

    def _found_removed(self, training: TrainingStatus | None) -> TaskOutcome | None:
        """Return the outcome of a job that its task may have removed, by its agents' records, which outlive it."""
        if self.phase == "succeeded" and training and training.ended in {"done", "stopped"}:
            return TaskOutcome(ended="ready", name=self.job, training=training)
        if ended := outcome_from_registry(self.job, training, self.began_at):
            return ended
        stopped = TaskOutcome(ended="gone", name=self.job, reason="the job was there, and somebody has stopped it")
        return stopped if self.seen else None

    def _fits(self, view: JobObservation, job: JobStatus) -> bool:
        if self.at_most == 0:  # no agent is left to report it
            return not job.instances
        training = view.training
        if not training or job.is_suspended:  # records from before a suspension stay for a while, and do not count
            return False
        if any(instance.started_at > training.heard_at for instance in job.instances):  # it has resumed since
            return False
        return training.instances >= self.at_least and (self.at_most is None or training.instances <= self.at_most)


def check_phase(field: str, phase: object) -> Any:
    """Return `phase` if it is valid. Raises SpecError."""
    if phase not in get_args(JobPhase):
        raise SpecError(field, phase, " or ".join(map(repr, get_args(JobPhase))))
    return phase


class EdlJobSensor(EdlSensor):
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
    arguments: ClassVar[Arguments] = {"job": check_name, "phase": check_phase, "at_least": as_count}
    condition = JobCondition

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
        self.check_arguments()

    def result(self, outcome: TaskOutcome) -> RunningJob:
        return outcome.running_job()
