"""Waits for a pool's teachers and students."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import conf

from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.templates import (
    as_count,
    check_connection,
    check_deferrable,
    has_template,
    task_deadline,
)
from edl_airflow.results import PoolResult
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.sensors.base import EdlSensor
from edl_airflow.waits.conditions import PoolCondition
from edl_runtime.errors import SpecError
from edl_runtime.specs import check_name


class EdlTeacherPoolSensor(EdlSensor[PoolCondition]):
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
        if not has_template(teacher_pool):
            check_name("teacher_pool", teacher_pool)
        if not has_template(at_least):
            as_count("at_least", at_least)
        if not isinstance(students, int) or students < 0:
            raise SpecError("students", students, "a whole number, 0 or more")

    def new_condition(self, until: float) -> PoolCondition:
        return PoolCondition(
            conn_id=self.edl_conn_id,
            pool=check_name("teacher_pool", self.teacher_pool),
            at_least=as_count("at_least", self.at_least),
            students=self.students,
            wait_timeout_s=self.timeout,
            until=until,
            deadline=task_deadline(self),
        )

    def result(self, outcome: TaskOutcome) -> PoolResult:
        return outcome.pool_result()
