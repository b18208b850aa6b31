"""Conditions that sensors and resizes wait for, and the loop that waits. Workers and triggerers run the same code."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from edl_airflow.client import EdlClient
from edl_airflow.runtime.log import LogFunction
from edl_airflow.runtime.runner import POLL_INTERVAL_S
from edl_airflow.runtime.spec import TaskOutcome


class Observation(Protocol):
    """What there is now."""

    @property
    def trouble(self) -> str:
        """Why Redis could not be asked, in words; empty if it could."""
        ...


AnyObservation = TypeVar("AnyObservation", bound=Observation)
"""What a look at what is waited for shows."""


class Condition(msgspec.Struct, Generic[AnyObservation], frozen=True, kw_only=True, tag_field="waits_for"):
    """What is waited for, and how long. Plain data without secrets. Times are Unix seconds.

    - `conn_id`: the Airflow connection.
    - `until`: when the wait is given up; `wait_timeout_s` is its length, for messages.
    - `deadline`: when the task's `execution_timeout` is over, None for never.
    - `began_at`: when the DAG's run has started: a job that has failed before is an earlier run's.
    - `because`: why this is waited for, in words, for the result; empty where nobody asks.
    """

    conn_id: str
    until: float
    wait_timeout_s: float
    deadline: float | None = None
    began_at: float = 0.0
    because: str = ""

    @property
    def about(self) -> str:
        """The name of what is waited for."""
        raise NotImplementedError

    async def observe(self, client: EdlClient) -> AnyObservation:
        """Look once. A Redis that is away is part of what is seen. Raises BackendError."""
        raise NotImplementedError

    def check(self, view: AnyObservation) -> TaskOutcome | None:
        """Return how the wait has ended by what there is, None if it has not."""
        raise NotImplementedError

    def on_timeout(self, view: AnyObservation) -> TaskOutcome:
        """Return how the wait ends when its time is up, and say what lacks."""
        raise NotImplementedError

    def after(self, view: AnyObservation) -> Self:
        """Return the wait as it goes on after a look."""
        raise NotImplementedError


def evaluate(condition: Condition[Any], view: Observation, now: float) -> TaskOutcome | None:
    """Return how the wait has ended, None if it has not."""
    outcome = condition.check(view)
    if outcome is None and condition.deadline is not None and now >= condition.deadline:
        outcome = TaskOutcome(ended="timed_out", name=condition.about)
    if outcome is None and now >= condition.until:
        outcome = condition.on_timeout(view)
    return outcome


async def wait_for(condition: Condition[Any], client: EdlClient, log: LogFunction) -> TaskOutcome:
    """Look until the wait has ended. Rides out a Redis that is away. Raises BackendError."""
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
