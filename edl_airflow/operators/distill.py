"""Service distillation in one task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperatorLink, conf

from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlConnection
from edl_airflow.identity import checkpoint_stream, job_name, pool_name, try_token
from edl_airflow.links import StudentsLink, TeacherPoolLink
from edl_airflow.operators.base import EdlOperator
from edl_airflow.operators.job_specs import pool_job_spec, trainer_job_spec
from edl_airflow.operators.preflight import check_checkpoint_folder, check_model, check_script
from edl_airflow.operators.templates import (
    Arguments,
    Maybe,
    as_seconds,
    check_connection,
    check_deferrable,
    path_text,
    run_start,
    task_deadline,
)
from edl_airflow.results import JobResult
from edl_airflow.runtime.spec import TaskOutcome, TaskSpec
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, Checkpoint, TeacherSpec, TrainerSpec, check_name, check_priority, check_weight

if TYPE_CHECKING:
    from airflow.sdk import Context


class EdlDistillOperator(EdlOperator):
    """Train a student on the answers of a pool of teachers.

    With a `teacher`, the task starts a pool, waits for its teachers, trains the student and stops the pool. Without
    one, it uses the running pool `teacher_pool`, and leaves it running.

    The student is one process or, with `students`, elastic trainers as in `EdlTrainOperator`, each of which distils its
    own part of the data.

    Returns a `JobResult`. A retry after a lost worker adopts the running student if its spec and its teacher's have not
    changed, and takes the result of one that has ended. The student's output is in the task's log; see
    `EdlTrainOperator`.

    A relative model path, checkpoint path or `cwd` starts from the folder of the DAG's file. The student waits for its
    first teacher as long as this task does.

    :param student: the training script and how to start it: a spec, a dict of its fields, or either from an upstream
        task (templated)
    :param teacher_pool: the pool's name; with a `teacher`, None for a name made from the task instance. The name of
        another running task's pool is refused, so overlapping runs and mapped tasks need one each (templated)
    :param teacher: what the teachers serve; None to use a running pool (templated)
    :param teachers: how many teachers, as Bounds, "min:max" or a number. With a `teacher`, the pool starts with min
        and can be resized up to max; without, the student waits for min. None is 1 (templated)
    :param students: how many instances the student trains with, as Bounds, "min:max" or a number: it starts with min
        and can be resized up to max. None for a script that is not elastic (templated)
    :param checkpoint: where the student keeps its checkpoints, as in `EdlTrainOperator`; needs `students`. A deferred
        task starts its students in the triggerer, so variables to pass on have to be set there, too (templated)
    :param job: the name of the student's job, for sensors and resizes; None for a name made from the task
        instance (templated)
    :param wait_timeout_s: seconds to wait for min teachers before the task fails
    :param progress_every_s: seconds between two lines of progress in the task's log, at least
    :param all_logs: write the output of all instances to the task's log, not only that of rank 0
    :param priority: of the student and its own pool; where not all jobs fit, a higher priority gets its instances first
    :param weight: above 0; beyond the minimums, a job of weight 2 gets about twice as many instances as one of 1
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    :param deferrable: follow the work in the triggerer, without a worker slot
    """

    template_fields: Sequence[str] = (
        *("student", "teacher_pool", "teacher", "teachers"),
        *("students", "checkpoint", "job", "edl_conn_id"),
    )
    template_fields_renderers: ClassVar[dict[str, str]] = dict.fromkeys(
        ("student", "teacher", "teachers", "students", "checkpoint"), "py"
    )
    operator_extra_links: Sequence[BaseOperatorLink] = (StudentsLink(), TeacherPoolLink())
    ui_color = "#d9ead3"
    arguments: ClassVar[Arguments] = {
        "student": TrainerSpec,
        "teacher_pool": Maybe(check_name),
        "teacher": Maybe(TeacherSpec),
        "teachers": Maybe(Bounds),
        "students": Maybe(Bounds),
        "checkpoint": Maybe(Checkpoint),
        "job": Maybe(check_name),
        "wait_timeout_s": as_seconds,
        "progress_every_s": as_seconds,
    }

    def __init__(
        self,
        *,
        student: TrainerSpec | dict[str, Any],
        teacher_pool: str | None = None,
        teacher: TeacherSpec | dict[str, Any] | None = None,
        teachers: Bounds | dict[str, Any] | str | int | None = None,
        students: Bounds | dict[str, Any] | str | int | None = None,
        checkpoint: Checkpoint | dict[str, Any] | Path | str | None = None,
        job: str | None = None,
        wait_timeout_s: float = 300,
        progress_every_s: float = 5,
        all_logs: bool = False,
        priority: int = 0,
        weight: float = 1.0,
        edl_conn_id: str = DEFAULT_CONN_ID,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.student = student
        self.teacher_pool = teacher_pool
        self.teacher = teacher
        self.teachers = teachers
        self.students = students
        self.checkpoint = path_text(checkpoint)
        self.job = job
        self.wait_timeout_s = wait_timeout_s
        self.progress_every_s = progress_every_s
        self.all_logs = all_logs
        self.priority = check_priority(priority)
        self.weight = check_weight(weight)
        self.edl_conn_id = check_connection(edl_conn_id)
        self.deferrable = check_deferrable(deferrable)
        if teacher is None and teacher_pool is None:
            raise SpecError("teacher_pool", teacher_pool, "the name of a running pool, or give a teacher to start one")
        if checkpoint is not None and students is None:
            raise SpecError("students", students, "how many elastic trainers write the checkpoint, as in '1:4'")
        self.check_arguments()

    def plan(self, context: Context, edl_connection: EdlConnection) -> TaskSpec:
        ti, namespace, folder = context["ti"], edl_connection.namespace, self.folder(edl_connection.place)
        pool = self.argument("teacher_pool") or pool_name(ti)
        bounds = self.argument("teachers") or Bounds(1, 1)
        teacher = self.argument("teacher")
        stream = "" if self.students is None else checkpoint_stream(ti.dag_id, ti.task_id, ti.map_index)
        sharing: dict[str, Any] = {"priority": self.priority, "weight": self.weight}
        own = pool_job_spec(pool, teacher, bounds, namespace=namespace, folder=folder, **sharing) if teacher else None
        return TaskSpec(
            conn_id=self.edl_conn_id,
            place=edl_connection.place,
            token=try_token(ti),
            pool=pool,
            pool_job=own,
            at_least=bounds.min,
            wait_timeout_s=self.wait_timeout_s,
            pool_deadline=time.time() + self.wait_timeout_s,
            trainer_job=trainer_job_spec(
                self.argument("student"),
                self.argument("students"),
                settings=RuntimeSettings(
                    namespace=namespace,
                    job=self.argument("job") or job_name(ti),
                    pool=pool,
                    teacher_wait_s=self.wait_timeout_s,
                    checkpoint_stream=stream,
                ),
                folder=folder,
                checkpoint=self.argument("checkpoint"),
                pool_digest=own.digest if own else "",
                **sharing,
            ),
            stream=stream,
            began_at=run_start(context).timestamp(),
            deadline=task_deadline(self),
            progress_every_s=self.progress_every_s,
            all_logs=self.all_logs,
        )

    def check(self, folder: Path) -> None:
        if teacher := self.argument("teacher"):
            check_model(teacher, folder)
        check_script("student", self.argument("student"), folder)
        check_checkpoint_folder(self.argument("checkpoint"), folder)

    def result(self, spec: TaskSpec, outcome: TaskOutcome) -> JobResult:
        left = outcome.result or {}
        return JobResult(
            job=outcome.name,
            pool=spec.pool,
            checkpoint=left.get("checkpoint") or (outcome.checkpoint["checkpoint"] if outcome.checkpoint else ""),
            metrics=left.get("metrics", {}),
            not_finite=left.get("not_finite", {}),
            answered=outcome.progress.answered if outcome.progress else {},
        )
