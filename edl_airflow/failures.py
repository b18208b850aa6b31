"""Which failures are infrastructure, and tried again, and which are the user's, and fail at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException, AirflowTaskTimeout

from edl_airflow.work import Outcome
from edl_runtime.errors import (
    EdlError,
    JobFailedError,
    ModelError,
    NoTeacherError,
    OwnedElsewhereError,
    PoolMismatchError,
    SpecError,
)

_MISTAKES = (
    SpecError,
    PoolMismatchError,
    ModelError,
    OwnedElsewhereError,
    AirflowNotFoundException,
    AirflowFailException,
)


class UsersMistakeError(AirflowFailException):
    """Raised when trying again can't help: a spec, a model or a connection has to be mended first."""


class PoolEndedError(AirflowFailException):
    """Raised when the pool that a task waits for was there and has ended."""

    def __init__(self, pool: str) -> None:
        super().__init__(pool)
        self.pool = pool

    def __str__(self) -> str:
        return f"pool {self.pool!r} has ended: it was there, and somebody has stopped it"


class TaskKilledError(EdlError):
    """Raised in a task that Airflow asked to end, once all its work outside is gone."""

    def __str__(self) -> str:
        return "Airflow asked this task to end; everything that it had started is stopped"


def is_users_mistake(error: BaseException) -> bool:
    """Whether trying again can't help."""
    return isinstance(error, _MISTAKES)


@contextmanager
def failing_clearly() -> Iterator[None]:
    """Turn the user's mistakes into an error that Airflow does not retry; leave all others as they are."""
    try:
        yield
    except AirflowFailException:
        raise
    except Exception as error:
        if is_users_mistake(error):
            raise UsersMistakeError(_in_dags_words(error)) from error
        raise


def _in_dags_words(error: Exception) -> str:
    if isinstance(error, OwnedElsewhereError) and error.kind == "pool":
        advice = "such as 'x-{{ ti.map_index }}', or let EdlDistillOperator make one up: leave teacher_pool out"
        return f"{error}. Give a name {advice}"
    return str(error)


def failure_of(outcome: Outcome, waits_s: float) -> BaseException | None:
    """Return the error to raise for `outcome`, None if all went well. `waits_s`: the wait limit, for its message."""
    match outcome.ended:
        case "ready" | "succeeded":
            return None
        case "failed":
            failed = JobFailedError(outcome.name, outcome.reason, outcome.last_lines)
            return UsersMistakeError(str(failed)) if outcome.permanent else failed
        case "gone":
            return PoolEndedError(outcome.name)
        case "no_teacher":
            return NoTeacherError(outcome.name, waits_s, outcome.reason)
        case "timed_out":
            return AirflowTaskTimeout(f"{outcome.name!r} took longer than the task's execution_timeout")
        case "taken_over":
            return JobFailedError(outcome.name, "a later try of this task has taken it over")
