"""Which failures are infrastructure, and tried again, and which are the user's, and fail at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException, AirflowTaskTimeout

from edl_airflow.work import Outcome
from edl_runtime.errors import EdlError, JobFailedError, ModelError, NoTeacherError, PoolMismatchError, SpecError


class UsersMistakeError(AirflowFailException):
    """Raised when trying again can't help: a spec, a model or a connection has to be mended first."""


class TaskKilledError(EdlError):
    """Raised in a task that Airflow asked to end, once all its work outside is gone."""

    def __str__(self) -> str:
        return "Airflow asked this task to end; everything that it had started is stopped"


def is_users_mistake(error: BaseException) -> bool:
    """Whether trying again can't help."""
    return isinstance(
        error, SpecError | PoolMismatchError | ModelError | AirflowNotFoundException | AirflowFailException
    )


@contextmanager
def failing_clearly() -> Iterator[None]:
    """Turn the user's mistakes into an error that Airflow does not retry; leave all others as they are."""
    try:
        yield
    except AirflowFailException:
        raise
    except Exception as error:
        if is_users_mistake(error):
            raise UsersMistakeError(str(error)) from error
        raise


def failure_of(outcome: Outcome, waits_s: float) -> BaseException | None:
    """Return the error to raise for `outcome`, None if all went well. `waits_s`: the wait limit, for its message."""
    match outcome.ended:
        case "ready" | "succeeded":
            return None
        case "failed":
            failed = JobFailedError(outcome.name, outcome.reason, outcome.last_lines)
            return UsersMistakeError(str(failed)) if outcome.permanent else failed
        case "no_teacher":
            return NoTeacherError(outcome.name, waits_s, outcome.reason)
        case "timed_out":
            return AirflowTaskTimeout(f"{outcome.name!r} took longer than the task's execution_timeout")
        case "taken_over":
            return JobFailedError(outcome.name, "a later try of this task has taken it over")
