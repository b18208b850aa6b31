"""Conditions that sensors and resizes wait for, and the loop that waits. Workers and triggerers run the same code."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Generic, Literal, Self, TypeVar, get_args

import msgspec

from edl_airflow.client import EdlClient, job_status
from edl_airflow.runtime.decisions import FINISHED_REASON, failed_outcome, is_unreachable, outcome_from_registry
from edl_airflow.runtime.log import LogFunction
from edl_airflow.runtime.runner import POLL_INTERVAL_S
from edl_airflow.runtime.spec import TaskOutcome, TrainingStatus
from edl_runtime.backends.interface import JobStatus
from edl_runtime.store.errors import RegistryUnavailableError

JobPhase = Literal["running", "succeeded"]
PHASES: tuple[JobPhase, ...] = get_args(JobPhase)

NOT_ELASTIC = (
    "it is not a job of elastic trainers, so it does not report how many of its instances train together; "
    "EdlTrainOperator starts such jobs, and so does EdlDistillOperator with `students`"
)

POOL_STOPPED_REASON = "the pool was there, and somebody has stopped it"


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What there is now. `trouble`: why Redis could not be asked, in words; empty if it could."""

    trouble: str = ""


AnyObservation = TypeVar("AnyObservation", bound=Observation)


class Condition(msgspec.Struct, Generic[AnyObservation], frozen=True, kw_only=True, tag_field="waits_for"):
    """What to wait for, and how long. Plain data without secrets. Times are Unix seconds.

    - `conn_id`: the Airflow connection.
    - `until`: the end of the wait; `wait_timeout_s` is its length, for messages.
    - `deadline`: the end of the task's `execution_timeout`, None for none.
    - `began_at`: the start of the DAG run; a job that failed earlier is another run's.
    - `because`: the reason of a resize, for the result; else empty.
    """

    conn_id: str
    until: float
    wait_timeout_s: float
    deadline: float | None = None
    began_at: float = 0.0
    because: str = ""

    @property
    def about(self) -> str:
        """The name of the target."""
        raise NotImplementedError

    async def observe(self, client: EdlClient) -> AnyObservation:
        """Observe once. An outage of Redis is part of the observation. Raises BackendError."""
        raise NotImplementedError

    def check(self, view: AnyObservation) -> TaskOutcome | None:
        """Return the outcome by this observation, None to keep waiting."""
        raise NotImplementedError

    def on_timeout(self, view: AnyObservation) -> TaskOutcome:
        """Return the outcome when the time is up, with what is missing."""
        raise NotImplementedError

    def after(self, view: AnyObservation) -> Self:
        """Return the condition for the next observation."""
        raise NotImplementedError


def evaluate(condition: Condition[Any], view: Observation, now: float) -> TaskOutcome | None:
    """Return the outcome, None to keep waiting. A condition that is true counts even if the time is up."""
    outcome = condition.check(view)
    if outcome is None and condition.deadline is not None and now >= condition.deadline:
        outcome = TaskOutcome(ended="timed_out", name=condition.about)
    if outcome is None and now >= condition.until:
        outcome = condition.on_timeout(view)
    return outcome


async def wait_for(condition: Condition[Any], client: EdlClient, log: LogFunction) -> TaskOutcome:
    """Observe until the wait has ended. Tolerates a Redis outage. Raises BackendError."""
    trouble = ""
    while True:
        view: Observation = await condition.observe(client)
        if outcome := evaluate(condition, view, time.time()):
            return outcome
        condition = condition.after(view)
        if view.trouble and not trouble:
            log(f"{view.trouble}. Waiting for it")
        trouble = view.trouble
        await asyncio.sleep(POLL_INTERVAL_S)


class JobObservation(Observation, frozen=True, kw_only=True):
    """`job` is None while the backend has none, `training` until the job's agents have registered."""

    job: JobStatus | None = None
    training: TrainingStatus | None = None


class JobCondition(Condition[JobObservation], frozen=True, kw_only=True, tag="job"):
    """A job that is `running` with `at_least` to `at_most` instances (None: no limit), or has `succeeded`.

    An instance counts once its generation trains. `at_most` 0 is a suspended job without instances. `seen`: the job has
    been seen, so its absence means that it has ended.
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
        """Return the outcome with the current instances."""
        training = None if self.at_most == 0 else view.training
        return TaskOutcome(ended="ready", name=self.job, training=training, reason=self.because)

    def on_timeout(self, view: JobObservation) -> TaskOutcome:
        return TaskOutcome(ended="not_yet", name=self.job, reason=self._missing(view))

    def after(self, view: JobObservation) -> Self:
        return msgspec.structs.replace(self, seen=True) if view.job else self

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
        instances = _training_now(view.training, job)
        return instances >= self.at_least and (self.at_most is None or instances <= self.at_most)

    def _missing(self, view: JobObservation) -> str:
        if view.trouble:
            return "Redis does not answer"
        if not view.job:
            return "there is no such job"
        if self.phase == "succeeded":
            return "it is still running"
        if self.at_most == 0:
            return f"{len(view.job.instances)} instances have yet to leave"
        wanted = f"{self.at_least} or more" if self.at_most is None else f"{self.at_least}"
        return f"{view.training.instances if view.training else 0} instances train together, {wanted} are required"


def _training_now(training: TrainingStatus | None, job: JobStatus) -> int:
    """Return how many instances train together; records from before a suspension stay for a while, and do not count."""
    if not training or job.is_suspended:
        return 0
    resumed = any(instance.started_at > training.heard_at for instance in job.instances)
    return 0 if resumed else training.instances


class PoolObservation(Observation, frozen=True, kw_only=True):
    """`pool` is None while the backend has none. With `trouble` nobody counts as registered."""

    pool: JobStatus | None = None
    teachers: tuple[str, ...] = ()
    students: int = 0


class PoolCondition(Condition[PoolObservation], frozen=True, kw_only=True, tag="pool"):
    """From `at_least` to `at_most` registered teachers (None: no limit) and at least `students` students.

    `seen`: the pool has been seen, so its absence means that it has ended.
    """

    pool: str
    at_least: int = 1
    at_most: int | None = None
    students: int = 0
    seen: bool = False

    @property
    def about(self) -> str:
        return self.pool

    async def observe(self, client: EdlClient) -> PoolObservation:
        pool = await job_status(client.backend, self.pool)
        try:
            teachers = await client.teachers(self.pool)
            students = len(await client.members(self.pool, "students")) if self.students else 0
        except RegistryUnavailableError as error:
            return PoolObservation(pool=pool, trouble=str(error))
        return PoolObservation(pool=pool, teachers=tuple(teachers), students=students)

    def check(self, view: PoolObservation) -> TaskOutcome | None:
        pool = view.pool
        if self.seen and not pool:
            return TaskOutcome(ended="gone", name=self.pool, reason=POOL_STOPPED_REASON)
        fits = not view.trouble and self._fits(view)
        if pool and (pool.phase == "failed" or (not fits and is_unreachable(pool, self.at_least))):
            return failed_outcome(pool)
        return self.ready(view) if fits else None

    def ready(self, view: PoolObservation) -> TaskOutcome:
        """Return the outcome with the current teachers."""
        return TaskOutcome(ended="ready", name=self.pool, teachers=view.teachers, reason=self.because)

    def on_timeout(self, view: PoolObservation) -> TaskOutcome:
        return TaskOutcome(ended="no_teacher", name=self.pool, reason=self._missing(view))

    def after(self, view: PoolObservation) -> Self:
        return msgspec.structs.replace(self, seen=True) if view.pool else self

    def _fits(self, view: PoolObservation) -> bool:
        teachers = len(view.teachers)
        few_enough = self.at_most is None or teachers <= self.at_most
        return teachers >= self.at_least and few_enough and view.students >= self.students

    def _missing(self, view: PoolObservation) -> str:
        if view.trouble:
            return "Redis does not answer"
        wanted = f"{self.at_least} or more" if self.at_most is None else f"{self.at_least}"
        missing = f"{len(view.teachers)} teachers are registered, {wanted} are required"
        return f"{missing}; students {view.students} of {self.students}" if self.students else missing
