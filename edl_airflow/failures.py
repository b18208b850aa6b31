"""Classifies failures: the infrastructure's are retried, the user's mistakes fail at once.

`EdlRetryPolicy` applies `is_user_error` and `is_transient` to any task. Operators, triggers and sensors also raise
errors of the right kind, so that the rule holds with any retry policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowNotFoundException,
    AirflowSkipException,
    AirflowTaskTimeout,
)

from edl_airflow.runtime.spec import TaskOutcome
from edl_runtime.backends.errors import JobFailedError, OwnedElsewhereError, SubmitError
from edl_runtime.distill.errors import NoPoolError, NoTeacherError
from edl_runtime.errors import EdlError
from edl_runtime.registry.errors import PoolMismatchError
from edl_runtime.store.errors import MalformedRecordError, RegistryAccessError
from edl_runtime.teacher.errors import ModelError

_MISTAKES = (
    PoolMismatchError,
    ModelError,
    OwnedElsewhereError,
    RegistryAccessError,
    AirflowNotFoundException,
    AirflowFailException,
)
"""User errors, beside those of our errors that are ValueErrors."""


class UserError(AirflowFailException):
    """Raised when a retry can't help: a spec, model or connection is wrong, or a person has stopped the job."""


class JobInterruptedError(JobFailedError):
    """Raised when a job has failed because of its cluster or the network; a retry may succeed."""


class TargetEndedError(AirflowFailException):
    """Raised when the pool or job that a task waits for has ended."""


@dataclass(eq=False, repr=False)
class WaitTimeoutError(EdlError):
    """Raised when a task has waited for a job or a checkpoint up to its wait limit."""

    name: str
    waited_s: float
    missing: str

    def __str__(self) -> str:
        return (
            f"waited {self.waited_s:.0f} s for {self.name!r}: {self.missing}; see `edl jobs`, or give the sensor a "
            "longer timeout"
        )


class TaskKilledError(EdlError):
    """Raised in a task that Airflow asked to end, after everything that it had started is stopped."""

    def __str__(self) -> str:
        return "Airflow asked this task to end; everything that it had started is stopped"


def is_user_error(error: BaseException) -> bool:
    """Whether a retry can't help."""
    if isinstance(error, SubmitError) and error.lacks_right:
        return True
    return isinstance(error, _MISTAKES) or (isinstance(error, EdlError) and isinstance(error, ValueError))


def is_transient(error: BaseException) -> bool:
    """Whether a retry may help: Redis or a cluster does not answer, or teachers or nodes are missing."""
    if isinstance(error, JobInterruptedError | NoTeacherError):
        return True
    is_damage = isinstance(error, MalformedRecordError)  # which may last
    return isinstance(error, EdlError) and isinstance(error, ConnectionError) and not is_damage


class failing_without_retry:  # noqa: N801 (a context manager)
    """Turns user errors into AirflowFailException, which Airflow does not retry; other errors stay as they are.

    Our errors lose their traceback, so that the task's log shows their message and no frames of ours.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, AirflowFailException):
            return
        if isinstance(error, Exception) and is_user_error(error):
            raise UserError(_in_dags_words(error)) from None
        if isinstance(error, EdlError):
            raise error.with_traceback(None) from None


def _in_dags_words(error: Exception) -> str:
    if not isinstance(error, OwnedElsewhereError):
        return str(error)
    field = "teacher_pool" if error.kind == "pool" else "job"
    return (
        f"{error}. Give a name such as 'x-{{{{ ti.map_index }}}}', or let the operator make one up: leave {field} out"
    )


def error_for(outcome: TaskOutcome, wait_timeout_s: float) -> BaseException | None:
    """Return the error to raise for `outcome`, None for a success; AirflowSkipException if there is nothing to do.

    `wait_timeout_s` is for the message.
    """
    error: BaseException | None = None
    match outcome.ended:
        case "failed":
            kind = JobInterruptedError if outcome.transient else JobFailedError
            failed = kind(outcome.name, outcome.reason, outcome.last_lines)
            error = UserError(str(failed)) if outcome.permanent else failed
        case "stopped" if not outcome.checkpoint:
            # a retry would find the time over, too
            error = UserError(str(JobFailedError(outcome.name, f"{outcome.reason}, and it has left no checkpoint")))
        case "too_late":
            error = AirflowSkipException(f"{outcome.name!r}: {outcome.reason}")
        case "gone":
            error = TargetEndedError(f"{outcome.name!r} has ended: {outcome.reason}")
        case "impossible":
            error = UserError(f"{outcome.name!r}: {outcome.reason}")
        case "no_teacher" | "no_pool":
            lacking = NoPoolError if outcome.ended == "no_pool" else NoTeacherError
            error = lacking(outcome.name, wait_timeout_s, outcome.reason)
        case "not_yet":
            error = WaitTimeoutError(outcome.name, wait_timeout_s, outcome.reason)
        case "timed_out":
            error = AirflowTaskTimeout(f"{outcome.name!r} took longer than the task's execution_timeout")
        case "taken_over":
            error = JobFailedError(outcome.name, "a later try of this task has taken it over")
    return error
