"""Waits until a pool has the members that a sensor or a resize asks for."""

from __future__ import annotations

from typing import Self

import msgspec

from edl_airflow.client import EdlClient, job_status
from edl_airflow.runtime.decisions import failed_outcome, is_unreachable
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.waits.base import Condition
from edl_runtime.backends.interface import JobStatus
from edl_runtime.store.errors import RegistryUnavailableError

POOL_STOPPED_REASON = "the pool was there, and somebody has stopped it"


class PoolObservation(msgspec.Struct, frozen=True, kw_only=True):
    """What there is now. `pool` is None while the backend knows none.

    `trouble`: why Redis could not be asked, in words; empty if it could, else nobody counts as registered.
    """

    pool: JobStatus | None = None
    teachers: tuple[str, ...] = ()
    students: int = 0
    trouble: str = ""


class PoolCondition(Condition[PoolObservation], frozen=True, kw_only=True, tag="pool"):
    """From `at_least` to `at_most` registered teachers (None: any number above) and at least `students` students.

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
        """Return how the wait ends with the teachers that there are."""
        return TaskOutcome(ended="ready", name=self.pool, teachers=view.teachers, reason=self.because)

    def on_timeout(self, view: PoolObservation) -> TaskOutcome:
        return TaskOutcome(ended="no_teacher", name=self.pool, reason=self._lack(view))

    def after(self, view: PoolObservation) -> Self:
        return msgspec.structs.replace(self, seen=True) if view.pool else self

    def _fits(self, view: PoolObservation) -> bool:
        teachers = len(view.teachers)
        few_enough = self.at_most is None or teachers <= self.at_most
        return teachers >= self.at_least and few_enough and view.students >= self.students

    def _lack(self, view: PoolObservation) -> str:
        if view.trouble:
            return "Redis does not answer"
        wanted = f"{self.at_least} or more" if self.at_most is None else f"{self.at_least}"
        lack = f"registered are {len(view.teachers)} teachers, wanted are {wanted}"
        return f"{lack}; students {view.students} of {self.students}" if self.students else lack
