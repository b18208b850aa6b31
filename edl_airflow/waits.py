"""Conditions, and the loop that waits for one."""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec

from edl_airflow.client import EdlClient
from edl_airflow.failures import is_user_error
from edl_airflow.runtime.log import LogFunction
from edl_airflow.runtime.runner import POLL_INTERVAL_S
from edl_airflow.runtime.spec import TaskOutcome
from edl_runtime.backends.interface import JobStatus
from edl_runtime.store.errors import RegistryUnavailableError

clock = time.time
"""Unix seconds, by this machine's clock, which may be set at any time."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What there is now. `job`: the job or pool, None while the backend has none. `trouble`: why Redis is away."""

    job: JobStatus | None = None
    trouble: str = ""


AnyObservation = TypeVar("AnyObservation", bound=Observation)


def outage(error: RegistryUnavailableError) -> str:
    """Return what a wait waits for while Redis is away. Raises the error if it does not pass, as a wrong password."""
    if is_user_error(error):
        raise error
    return str(error)


class Condition(msgspec.Struct, Generic[AnyObservation], frozen=True, kw_only=True):
    """What to wait for, and how long. Plain data without secrets. Times are Unix seconds.

    - `conn_id`: the Airflow connection.
    - `until`: the end of the wait; `wait_timeout_s` is its length, for messages.
    - `deadline`: the end of the task's `execution_timeout`, None for none.
    - `began_at`: the start of the DAG run; a job that failed earlier is another run's.
    - `because`: the reason of a resize, for the result; else empty.
    - `seen`: the job or pool has been seen, so its absence means that it has ended.
    """

    needs_client: ClassVar[bool] = True
    timeout_is: ClassVar[Any] = "not_yet"

    conn_id: str
    until: float
    wait_timeout_s: float
    deadline: float | None = None
    began_at: float = 0.0
    because: str = ""
    seen: bool = False

    @property
    def about(self) -> str:
        """The name of the target."""
        raise NotImplementedError

    async def observe(self, client: EdlClient, now: float) -> AnyObservation:
        """Observe once. An outage of Redis is part of the observation. Raises BackendError."""
        raise NotImplementedError

    def check(self, view: AnyObservation) -> TaskOutcome | None:
        """Return the outcome by this observation, None to keep waiting."""
        raise NotImplementedError

    def missing(self, view: AnyObservation) -> str:
        """Return what is missing, in words."""
        raise NotImplementedError

    def on_timeout(self, view: AnyObservation) -> TaskOutcome:
        """Return the outcome when the time is up, with what is missing."""
        missing = "Redis does not answer" if view.trouble else self.missing(view)
        return TaskOutcome(ended=self.timeout_is, name=self.about, reason=missing)

    def after(self, view: AnyObservation) -> Self:
        """Return the condition for the next observation."""
        return msgspec.structs.replace(self, seen=True) if view.job else self

    def pause_s(self, view: AnyObservation, now: float) -> float:  # noqa: ARG002 (a condition of time needs them)
        """Return the seconds until the next observation."""
        return POLL_INTERVAL_S


def kind_of(condition: Condition[Any]) -> str:
    """Return the name by which `condition_kind` finds a condition's class."""
    return f"{type(condition).__module__}.{type(condition).__qualname__}"


def condition_kind(name: str) -> type[Condition[Any]]:
    """Return the class of that name. Raises TypeError if it is no condition."""
    module, _, kind = name.rpartition(".")
    found = getattr(importlib.import_module(module), kind)
    if not (isinstance(found, type) and issubclass(found, Condition)):
        raise TypeError(f"{name} is no condition")
    return found


def evaluate(condition: Condition[Any], view: Observation, now: float) -> TaskOutcome | None:
    """Return the outcome, None to keep waiting. A condition that is true counts even if the time is up."""
    outcome = condition.check(view)
    if outcome is None and condition.deadline is not None and now >= condition.deadline:
        outcome = TaskOutcome(ended="timed_out", name=condition.about)
    if outcome is None and now >= condition.until:
        outcome = condition.on_timeout(view)
    return outcome


async def wait_for(condition: Condition[Any], client: Any, log: LogFunction) -> TaskOutcome:
    """Observe until the wait has ended. Tolerates a Redis outage. Raises BackendError.

    `client` is an `EdlClient`, or None for a condition that needs none.
    """
    trouble = ""
    while True:
        view: Observation = await condition.observe(client, clock())
        now = clock()
        if outcome := evaluate(condition, view, now):
            return outcome
        condition = condition.after(view)
        if view.trouble and not trouble:
            log(f"{view.trouble}. Waiting for it")
        trouble = view.trouble
        await asyncio.sleep(condition.pause_s(view, now))


def count_text(at_least: int, at_most: int | None) -> str:
    """Return how many are wanted, in words."""
    return f"{at_least} or more" if at_most is None else f"{at_least}"
