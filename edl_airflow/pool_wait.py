"""Waits until a pool has the members that a sensor or a resize asks for. Workers and triggerers run the same code."""

from __future__ import annotations

import asyncio
import time

import msgspec

from edl_airflow.conductor import LOOK_EVERY_S, job_status
from edl_airflow.decisions import failure, is_hopeless
from edl_airflow.site import Site
from edl_airflow.telling import Say
from edl_airflow.work import Outcome
from edl_runtime.backends.base import JobStatus
from edl_runtime.errors import RegistryUnavailableError


class PoolWait(msgspec.Struct, frozen=True, kw_only=True):
    """From `at_least` to `at_most` registered teachers (None: any number above) and at least `students` students.

    - `conn_id`: the Airflow connection.
    - `pool_deadline`: Unix seconds when the wait is given up; `waits_s` is its length, for messages.
    - `deadline`: when the task's `execution_timeout` is over, None for never.
    - `seen`: the pool has been seen, so its absence means that it has ended.
    """

    conn_id: str
    pool: str
    pool_deadline: float
    waits_s: float
    deadline: float | None = None
    at_least: int = 1
    at_most: int | None = None
    students: int = 0
    seen: bool = False

    def after(self, view: PoolView) -> PoolWait:
        """Return the wait as it goes on after a look."""
        return msgspec.structs.replace(self, seen=True) if view.pool else self


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """What there is now. `pool` is None while the backend knows none.

    `trouble`: why Redis could not be asked, in words; empty if it could, else nobody counts as registered.
    """

    pool: JobStatus | None = None
    teachers: tuple[str, ...] = ()
    students: int = 0
    trouble: str = ""


def judge(wait: PoolWait, view: PoolView, now: float) -> Outcome | None:
    """Return how the wait has ended, None if it has not."""
    pool = view.pool
    if wait.seen and not pool:
        return Outcome(ended="gone", name=wait.pool)
    fits = not view.trouble and _fits(wait, view)
    if pool and (pool.phase == "failed" or (not fits and is_hopeless(pool, wait.at_least))):
        return failure(pool)
    if fits:
        return Outcome(ended="ready", name=wait.pool, teachers=view.teachers)
    if wait.deadline is not None and now >= wait.deadline:
        return Outcome(ended="timed_out", name=wait.pool)
    if now >= wait.pool_deadline:
        return Outcome(ended="no_teacher", name=wait.pool, reason=_lack(wait, view))
    return None


async def look(wait: PoolWait, site: Site) -> PoolView:
    """Look once. A Redis that is away is part of what is seen. Raises BackendError."""
    pool = await job_status(site.backend, wait.pool)
    try:
        teachers = await site.teachers(wait.pool)
        students = len(await site.members(wait.pool, "students")) if wait.students else 0
    except RegistryUnavailableError as error:
        return PoolView(pool=pool, trouble=str(error))
    return PoolView(pool=pool, teachers=tuple(teachers), students=students)


async def wait_for_pool(wait: PoolWait, site: Site, say: Say) -> Outcome:
    """Look until the wait has ended. Rides out a Redis that is away. Raises BackendError."""
    trouble = ""
    while True:
        view = await look(wait, site)
        if outcome := judge(wait, view, time.time()):
            return outcome
        wait = wait.after(view)
        if view.trouble and not trouble:
            say(f"{view.trouble}. Waiting for it")
        trouble = view.trouble
        await asyncio.sleep(LOOK_EVERY_S)


def _fits(wait: PoolWait, view: PoolView) -> bool:
    teachers = len(view.teachers)
    few_enough = wait.at_most is None or teachers <= wait.at_most
    return teachers >= wait.at_least and few_enough and view.students >= wait.students


def _lack(wait: PoolWait, view: PoolView) -> str:
    if view.trouble:
        return "Redis does not answer"
    wanted = f"{wait.at_least} or more" if wait.at_most is None else f"{wait.at_least}"
    lack = f"registered are {len(view.teachers)} teachers, wanted are {wanted}"
    return f"{lack}; students {view.students} of {wait.students}" if wait.students else lack
