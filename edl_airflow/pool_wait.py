"""Waits until a pool has the members that a sensor or a resize asks for. Workers and triggerers run the same code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from edl_airflow.conductor import LOOK_EVERY_S, Say, failure, job_status
from edl_airflow.hooks.edl import Site
from edl_airflow.work import Outcome
from edl_runtime.backends.base import JobStatus
from edl_runtime.errors import RegistryUnavailableError


class PoolWait(msgspec.Struct, frozen=True, kw_only=True):
    """From `at_least` to `at_most` registered teachers (None: any number above) and at least `students` students.

    - `conn_id`: the Airflow connection.
    - `deadline`: Unix seconds when the wait is given up; `waits_s` is its length, for messages.
    """

    conn_id: str
    pool: str
    deadline: float
    waits_s: float
    at_least: int = 1
    at_most: int | None = None
    students: int = 0


def judge(
    wait: PoolWait, teachers: Sequence[str] | None, students: int, pool: JobStatus | None, now: float
) -> Outcome | None:
    """Return how the wait has ended, None if it has not. `teachers` is None while Redis is away."""
    if teachers is not None and _fits(wait, len(teachers)) and students >= wait.students:
        return Outcome(ended="ready", name=wait.pool, teachers=tuple(teachers))
    if pool and pool.phase == "failed":
        return failure(pool)
    if now >= wait.deadline:
        return Outcome(ended="no_teacher", name=wait.pool, reason=_lack(wait, teachers, students))
    return None


async def look(wait: PoolWait, site: Site) -> Outcome | None:
    """Look once. Raises RegistryUnavailableError."""
    teachers = await site.teachers(wait.pool)
    students = len(await site.members(wait.pool, "students")) if wait.students else 0
    return judge(wait, teachers, students, await job_status(site, wait.pool), time.time())


async def wait_for_pool(wait: PoolWait, site: Site, say: Say) -> Outcome:
    """Look until the wait has ended. Rides out a Redis that is away. Raises BackendError."""
    away = False
    while True:
        try:
            outcome = await look(wait, site)
            away = False
        except RegistryUnavailableError as error:
            outcome = judge(wait, None, 0, await job_status(site, wait.pool), time.time())
            if not away:
                say(f"{error}. Waiting for it")
            away = True
        if outcome:
            return outcome
        await asyncio.sleep(LOOK_EVERY_S)


def _fits(wait: PoolWait, teachers: int) -> bool:
    return teachers >= wait.at_least and (wait.at_most is None or teachers <= wait.at_most)


def _lack(wait: PoolWait, teachers: Sequence[str] | None, students: int) -> str:
    if teachers is None:
        return "Redis does not answer"
    wanted = f"{wait.at_least} or more" if wait.at_most is None else f"{wait.at_least}"
    lack = f"registered are {len(teachers)} teachers, wanted are {wanted}"
    return f"{lack}; students {students} of {wait.students}" if wait.students else lack
