"""Starts and stops a teacher pool, for DAGs that share it between tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperatorLink, conf

from edl_airflow.backends import backend_for
from edl_airflow.failures import failing_without_retry
from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlConnection, EdlHook
from edl_airflow.identity import try_token
from edl_airflow.links import TeacherPoolLink
from edl_airflow.operators.base import EdlOperator
from edl_airflow.operators.job_specs import pool_job_spec, registration_job
from edl_airflow.operators.preflight import check_model
from edl_airflow.operators.templates import (
    Arguments,
    TemplatedOperator,
    as_seconds,
    check_connection,
    check_deferrable,
    task_deadline,
)
from edl_airflow.results import PoolResult
from edl_airflow.runtime.spec import TaskOutcome, TaskSpec
from edl_runtime.backends.interface import Backend
from edl_runtime.concurrency import all_ended
from edl_runtime.specs import Bounds, TeacherSpec, check_name, check_priority, check_weight

if TYPE_CHECKING:
    from airflow.sdk import Context


class EdlTeacherPoolOperator(EdlOperator):
    """Start a pool of teachers and succeed when at least min of them are registered; the pool keeps running.

    Use it as a setup with an `EdlStopTeacherPoolOperator` as its teardown, `stop.as_teardown(setups=start)`, so that
    the pool is stopped when a task between them fails. A task that fails leaves no pool.

    Returns a `PoolResult`. A pool of an earlier try is kept if its spec has not changed, and replaced if it has; a
    running pool of another task or run is refused. A relative model path starts from the folder of the DAG's file.

    :param teacher_pool: the pool's name, a DNS label of at most 52 letters (templated)
    :param teacher: what the teachers serve: a spec, a dict of its fields, or either from an upstream task (templated)
    :param teachers: how many teachers, as Bounds, "min:max" or a number: the pool starts with min and can be resized
        up to max (templated)
    :param wait_timeout_s: seconds to wait for min teachers before the task fails
    :param priority: where not all jobs fit, a higher priority gets its instances first
    :param weight: above 0; beyond the minimums, a job of weight 2 gets about twice as many instances as one of 1
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    :param deferrable: wait in the triggerer, without a worker slot
    """

    template_fields: Sequence[str] = ("teacher_pool", "teacher", "teachers", "edl_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"teacher": "py", "teachers": "py"}
    operator_extra_links: Sequence[BaseOperatorLink] = (TeacherPoolLink(),)
    ui_color = "#cfe2f3"
    arguments: ClassVar[Arguments] = {
        "teacher_pool": check_name,
        "teacher": TeacherSpec,
        "teachers": Bounds,
        "wait_timeout_s": as_seconds,
    }
    keeps_pool = True

    def __init__(
        self,
        *,
        teacher_pool: str,
        teacher: TeacherSpec | dict[str, Any],
        teachers: Bounds | dict[str, Any] | str | int,
        wait_timeout_s: float = 300,
        priority: int = 0,
        weight: float = 1.0,
        edl_conn_id: str = DEFAULT_CONN_ID,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.teacher_pool = teacher_pool
        self.teacher = teacher
        self.teachers = teachers
        self.wait_timeout_s = wait_timeout_s
        self.priority = check_priority(priority)
        self.weight = check_weight(weight)
        self.edl_conn_id = check_connection(edl_conn_id)
        self.deferrable = check_deferrable(deferrable)
        self.check_arguments()

    def plan(self, context: Context, edl_connection: EdlConnection) -> TaskSpec:
        pool, bounds = self.argument("teacher_pool"), self.argument("teachers")
        return TaskSpec(
            conn_id=self.edl_conn_id,
            place=edl_connection.place,
            token=try_token(context["ti"]),
            pool=pool,
            pool_job=pool_job_spec(
                pool,
                self.argument("teacher"),
                bounds,
                namespace=edl_connection.namespace,
                folder=self.folder(edl_connection.place),
                priority=self.priority,
                weight=self.weight,
            ),
            at_least=bounds.min,
            wait_timeout_s=self.wait_timeout_s,
            pool_deadline=time.time() + self.wait_timeout_s,
            deadline=task_deadline(self),
        )

    def check(self, folder: Path) -> None:
        check_model(self.argument("teacher"), folder)

    def result(self, spec: TaskSpec, outcome: TaskOutcome) -> PoolResult:  # noqa: ARG002
        return outcome.pool_result()


class EdlStopTeacherPoolOperator(TemplatedOperator):
    """Stop a pool of teachers, and wait until its last process has ended. Succeeds if there is no such pool.

    Servers that an `EdlRegisterServersOperator` brought into the pool leave it, and run on. It stops the pool whoever
    started or uses it, so give each run's pool its own name where runs may overlap. It does not need Redis.

    :param teacher_pool: the pool's name (templated)
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    """

    template_fields: Sequence[str] = ("teacher_pool", "edl_conn_id")
    ui_color = "#cfe2f3"
    arguments: ClassVar[Arguments] = {"teacher_pool": check_name}

    def __init__(self, *, teacher_pool: str, edl_conn_id: str = DEFAULT_CONN_ID, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.teacher_pool = teacher_pool
        self.edl_conn_id = check_connection(edl_conn_id)
        self.check_arguments()

    def execute(self, context: Context) -> None:  # noqa: ARG002
        """Stop the pool and return when its last process has ended."""
        with failing_without_retry():
            pool = self.argument("teacher_pool")
            backend = backend_for(EdlHook(self.edl_conn_id).edl_connection().place)
            stopped = asyncio.run(_stop(pool, backend))
        self.log.info("Pool %r is stopped" if stopped else "There was no pool %r", pool)


async def _stop(pool: str, backend: Backend) -> bool:
    """Stop a pool's own teachers and what registers servers in it; return whether there was any."""
    return any(await all_ended(backend.delete(pool), backend.delete(registration_job(pool))))
