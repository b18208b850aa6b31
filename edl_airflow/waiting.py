"""What sensors and resizes wait for, and the loop that waits. Workers and triggerers run the same code."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from edl_airflow.conductor import LOOK_EVERY_S
from edl_airflow.site import Site
from edl_airflow.telling import Say
from edl_airflow.work import Outcome


class View(Protocol):
    """What there is now."""

    @property
    def trouble(self) -> str:
        """Why Redis could not be asked, in words; empty if it could."""
        ...


Seen = TypeVar("Seen", bound=View)
"""What a look at what is waited for shows."""


class Wait(msgspec.Struct, Generic[Seen], frozen=True, kw_only=True, tag_field="waits_for"):
    """What is waited for, and how long. Plain data without secrets. Times are Unix seconds.

    - `conn_id`: the Airflow connection.
    - `until`: when the wait is given up; `waits_s` is its length, for messages.
    - `deadline`: when the task's `execution_timeout` is over, None for never.
    - `began_at`: when the DAG's run has started: a job that has failed before is an earlier run's.
    - `because`: why this is waited for, in words, for the result; empty where nobody asks.
    """

    conn_id: str
    until: float
    waits_s: float
    deadline: float | None = None
    began_at: float = 0.0
    because: str = ""

    @property
    def about(self) -> str:
        """The name of what is waited for."""
        raise NotImplementedError

    async def look(self, site: Site) -> Seen:
        """Look once. A Redis that is away is part of what is seen. Raises BackendError."""
        raise NotImplementedError

    def found(self, view: Seen) -> Outcome | None:
        """Return how the wait has ended by what there is, None if it has not."""
        raise NotImplementedError

    def given_up(self, view: Seen) -> Outcome:
        """Return how the wait ends when its time is up, and say what lacks."""
        raise NotImplementedError

    def after(self, view: Seen) -> Self:
        """Return the wait as it goes on after a look."""
        raise NotImplementedError


def judge(wait: Wait[Any], view: View, now: float) -> Outcome | None:
    """Return how the wait has ended, None if it has not."""
    outcome = wait.found(view)
    if outcome is None and wait.deadline is not None and now >= wait.deadline:
        outcome = Outcome(ended="timed_out", name=wait.about)
    if outcome is None and now >= wait.until:
        outcome = wait.given_up(view)
    return outcome


async def wait_for(wait: Wait[Any], site: Site, say: Say) -> Outcome:
    """Look until the wait has ended. Rides out a Redis that is away. Raises BackendError."""
    trouble = ""
    while True:
        view: View = await wait.look(site)
        if outcome := judge(wait, view, time.time()):
            return outcome
        wait = wait.after(view)
        if view.trouble and not trouble:
            say(f"{view.trouble}. Waiting for it")
        trouble = view.trouble
        await asyncio.sleep(LOOK_EVERY_S)
