"""Waits for a pool's teachers and students."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from airflow.sdk import conf

from edl_airflow.client import EdlClient, job_status
from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.templates import Arguments, as_count, check_connection, check_deferrable
from edl_airflow.results import PoolResult
from edl_airflow.runtime.decisions import failed_outcome, is_unreachable, still_loading, unknown_pool
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.sensors.base import EdlSensor
from edl_airflow.waits import Condition, Observation, count_text, outage
from edl_runtime.errors import SpecError, counted
from edl_runtime.specs import check_name
from edl_runtime.store.errors import RegistryUnavailableError

POOL_STOPPED_REASON = "the pool was there, and somebody has stopped it"


class PoolObservation(Observation, frozen=True, kw_only=True):
    """With `trouble` nobody counts as registered. `other_pools`: as in `TaskState`."""

    teachers: tuple[str, ...] = ()
    students: int = 0
    other_pools: str = ""


class PoolCondition(Condition[PoolObservation], frozen=True, kw_only=True):
    """From `at_least` to `at_most` registered teachers (None: no limit) and at least `students` students."""

    timeout_is = "no_teacher"

    teacher_pool: str
    at_least: int = 1
    at_most: int | None = None
    students: int = 0

    @property
    def about(self) -> str:
        return self.teacher_pool

    async def observe(self, client: EdlClient, now: float) -> PoolObservation:  # noqa: ARG002 (not by the clock)
        pool = await job_status(client.backend, self.teacher_pool)
        try:
            teachers = await client.teachers(self.teacher_pool)
            students = len(await client.members(self.teacher_pool, "students")) if self.students else 0
            others = "" if pool or teachers else await client.other_pools(self.teacher_pool)
        except RegistryUnavailableError as error:
            return PoolObservation(job=pool, trouble=outage(error))
        return PoolObservation(job=pool, teachers=tuple(teachers), students=students, other_pools=others)

    def check(self, view: PoolObservation) -> TaskOutcome | None:
        pool = view.job
        if self.seen and not pool:
            return TaskOutcome(ended="gone", name=self.teacher_pool, reason=POOL_STOPPED_REASON)
        fits = not view.trouble and self._fits(view)
        if pool and (pool.phase == "failed" or (not fits and is_unreachable(pool, self.at_least))):
            return failed_outcome(pool)
        return self.ready(view) if fits else None

    def ready(self, view: PoolObservation) -> TaskOutcome:
        """Return the outcome with the current teachers."""
        return TaskOutcome(ended="ready", name=self.teacher_pool, teachers=view.teachers, reason=self.because)

    def on_timeout(self, view: PoolObservation) -> TaskOutcome:
        outcome = super().on_timeout(view)
        return msgspec.structs.replace(outcome, ended="no_pool") if view.other_pools else outcome

    def missing(self, view: PoolObservation) -> str:
        wanted = count_text(self.at_least, self.at_most)
        if view.other_pools:
            return unknown_pool(view.other_pools)
        missing = f"it has {counted(len(view.teachers), 'registered teacher')}, required: {wanted}"
        if view.job and len(view.teachers) < self.at_least and not view.job.reason:
            missing = f"{missing}; {still_loading(view.job.name)}"
        return f"{missing}; students {view.students} of {self.students}" if self.students else missing

    def _fits(self, view: PoolObservation) -> bool:
        teachers = len(view.teachers)
        few_enough = self.at_most is None or teachers <= self.at_most
        return teachers >= self.at_least and few_enough and view.students >= self.students


def check_students(field: str, students: object) -> int:
    """Return `students` if it is valid. Raises SpecError."""
    if not isinstance(students, int) or students < 0:
        raise SpecError(field, students, "a whole number, 0 or more")
    return students


class EdlTeacherPoolSensor(EdlSensor):
    """Succeed when a pool has at least so many registered teachers, and so many students attached to it.

    Returns a `PoolResult`. Fails at once when the pool has failed or ended; see `EdlSensor` for what all sensors share.

    :param teacher_pool: the pool's name (templated)
    :param at_least: how many teachers (templated)
    :param students: how many students, 0 for any number
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    :param deferrable: wait in the triggerer, without a worker slot
    """

    template_fields: Sequence[str] = ("teacher_pool", "at_least", "edl_conn_id")
    ui_color = "#ead1dc"
    arguments: ClassVar[Arguments] = {"teacher_pool": check_name, "at_least": as_count, "students": check_students}
    condition = PoolCondition

    def __init__(
        self,
        *,
        teacher_pool: str,
        at_least: int | str = 1,
        students: int = 0,
        edl_conn_id: str = DEFAULT_CONN_ID,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.teacher_pool = teacher_pool
        self.at_least = at_least
        self.students = students
        self.edl_conn_id = check_connection(edl_conn_id)
        self.deferrable = check_deferrable(deferrable)
        self.check_arguments()

    def result(self, outcome: TaskOutcome) -> PoolResult:
        return outcome.pool_result()
