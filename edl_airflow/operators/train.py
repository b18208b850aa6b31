"""Elastic training in one task."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from airflow.sdk import BaseOperatorLink, conf

from edl_airflow.deadlines import EndsBy, check_ends_by, deadline_of
from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlConnection
from edl_airflow.identity import checkpoint_stream, job_name, try_token
from edl_airflow.links import TrainersLink
from edl_airflow.operators.base import EdlOperator
from edl_airflow.operators.job_specs import trainer_job_spec
from edl_airflow.operators.preflight import check_checkpoint_folder, check_script
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
from edl_airflow.results import TrainResult
from edl_airflow.runtime.spec import TaskOutcome, TaskSpec
from edl_runtime.compat.manifest_yaml import manifest_text
from edl_runtime.compat.training_job import TrainingJob, read_training_job
from edl_runtime.elastic.comm.agent_protocol import GEARS, Gear
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, Checkpoint, TrainerSpec, check_name, check_priority, check_weight

if TYPE_CHECKING:
    from airflow.sdk import Context


SCHEDULED = "scheduled"
"""The type of a run that a DAG's schedule has created."""


class EdlTrainOperator(EdlOperator):
    """Train with a number of instances that may change meanwhile; see `EdlResizeOperator`.

    Continues from the newest checkpoint at `checkpoint`, whichever run has written it. Returns a `TrainResult`. The
    task's log has rank 0's output, and that of all instances once one of them has failed, each line once and with its
    instance's number, also while the task is deferred; of much output it leaves lines out, and counts them. A retry
    after a lost worker adopts the running training if its spec has not changed, and takes the result of one that has
    ended; a task that is cleared trains again. A retry of a failed training starts with min instances, whatever size it
    had.

    Checkpoints are published in the stream "DAG/TASK" ("DAG/TASK/0" of a mapped task), which outlives the run, for
    `EdlCheckpointSensor` and `EdlCheckpointTrigger`.

    A relative `cwd` or checkpoint path starts from the folder of the DAG's file; "~" is the home folder of the user who
    runs the task.

    :param trainer: the training script and how to start it: a spec, a dict of its fields, or either from an upstream
        task (templated)
    :param trainers: how many instances, as Bounds, "min:max" or a number: it starts with min and can be resized up to
        max (templated)
    :param checkpoint: where checkpoints are kept and how often one is written; a path or URL keeps the default
        interval; None for a training without checkpoints. Name the variables that an object store needs, as
        AWS_ACCESS_KEY_ID, in the connection's field "Variables to pass on" (templated)
    :param gear: the fastest allowed way to change the number of instances: "live", "warm" or "cold"
    :param job: the job's name, for sensors and resizes; None for a name made from the task instance (templated)
    :param ends_by: when training has to end, with a checkpoint: a time of day ("07:00", the next one in the DAG's time
        zone after the start of the run, or after the scheduled start of a scheduled run), a duration since the run's
        start (a timedelta, "PT9H"), or a moment ("2026-01-31T07:00", a datetime). The task succeeds then, with
        `stopped` in its result; it is skipped in a run that starts later. None for no limit (templated)
    :param stop_grace_s: seconds that a training has to end after it was asked to, before it is killed; the task
        succeeds if there is a checkpoint
    :param progress_every_s: seconds between two lines of progress in the task's log, at least
    :param all_logs: write the output of all instances to the task's log, not only that of rank 0
    :param priority: where not all jobs fit, a higher priority gets its instances first
    :param weight: above 0; beyond the minimums, a job of weight 2 gets about twice as many instances as one of 1
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    :param deferrable: follow the training in the triggerer, without a worker slot
    """

    template_fields: Sequence[str] = ("trainer", "trainers", "checkpoint", "job", "ends_by", "edl_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"trainer": "py", "trainers": "py", "checkpoint": "py"}
    operator_extra_links: Sequence[BaseOperatorLink] = (TrainersLink(),)
    ui_color = "#d9ead3"
    arguments: ClassVar[Arguments] = {
        "trainer": TrainerSpec,
        "trainers": Bounds,
        "checkpoint": Maybe(Checkpoint),
        "job": Maybe(check_name),
        "ends_by": Maybe(check_ends_by),
        "stop_grace_s": as_seconds,
        "progress_every_s": as_seconds,
    }

    def __init__(
        self,
        *,
        trainer: TrainerSpec | dict[str, Any],
        trainers: Bounds | dict[str, Any] | str | int = 1,
        checkpoint: Checkpoint | dict[str, Any] | Path | str | None = None,
        gear: Gear = "live",
        job: str | None = None,
        ends_by: EndsBy | None = None,
        stop_grace_s: float = 60,
        progress_every_s: float = 5,
        all_logs: bool = False,
        priority: int = 0,
        weight: float = 1.0,
        edl_conn_id: str = DEFAULT_CONN_ID,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.trainer = trainer
        self.trainers = trainers
        self.checkpoint = path_text(checkpoint)
        self.gear: Gear = gear
        self.job = job
        self.ends_by = ends_by
        self.stop_grace_s = stop_grace_s
        self.progress_every_s = progress_every_s
        self.all_logs = all_logs
        self.priority = check_priority(priority)
        self.weight = check_weight(weight)
        self.edl_conn_id = check_connection(edl_conn_id)
        self.deferrable = check_deferrable(deferrable)
        if gear not in GEARS:
            raise SpecError("gear", gear, ", ".join(map(repr, GEARS)))
        self.check_arguments()

    @classmethod
    def from_manifest(cls, manifest: Path | str, *, task_id: str, name: str = "", **given: Any) -> Self:
        """Return the task for a `TrainingJob` manifest of the original EDL; see `edl_runtime.compat`.

        The task's documentation lists fields with another meaning, or none. Raises SpecError for an invalid manifest,
        and for a volume of a kind that neither `restricted` pods nor EDL_MANIFEST_VOLUMES of this process allow.

        :param manifest: a file's path, or the YAML itself, of several lines. Its `workspace` is the trainer's `cwd`
        :param task_id: the task's id, as of any operator
        :param name: the name of the job, where the file has several
        :param given: parameters of the operator; they override the manifest
        """
        is_text = isinstance(manifest, str) and "\n" in manifest
        text = str(manifest) if is_text else manifest_text(Path(manifest))
        volumes = RuntimeSettings.from_env(os.environ).manifest_volumes
        job = _named(read_training_job(text, volumes=volumes), name)
        notes = "".join(f"- {note}\n" for note in job.notes)
        stated = {
            "trainer": job.trainer,
            "trainers": job.bounds,
            "doc_md": f"From the TrainingJob `{job.name}`.\n\n{notes}",
        }
        return cls(task_id=task_id, **{**stated, **given})

    def plan(self, context: Context, edl_connection: EdlConnection) -> TaskSpec:
        ti = context["ti"]
        stream = checkpoint_stream(ti.dag_id, ti.task_id, ti.map_index)
        start = run_start(context)
        return TaskSpec(
            conn_id=self.edl_conn_id,
            place=edl_connection.place,
            token=try_token(ti),
            trainer_job=trainer_job_spec(
                self.argument("trainer"),
                self.argument("trainers"),
                settings=RuntimeSettings(
                    namespace=edl_connection.namespace,
                    job=self.argument("job") or job_name(ti),
                    checkpoint_stream=stream,
                ),
                folder=self.folder(edl_connection.place),
                gear=self.gear,
                checkpoint=self.argument("checkpoint"),
                priority=self.priority,
                weight=self.weight,
            ),
            stream=stream,
            began_at=start.timestamp(),
            ends_at=self._ends_at(start, context.get("dag_run")),
            stop_grace_s=self.stop_grace_s,
            deadline=task_deadline(self),
            progress_every_s=self.progress_every_s,
            all_logs=self.all_logs,
        )

    def check(self, folder: Path) -> None:
        check_script("trainer", self.argument("trainer"), folder)
        check_checkpoint_folder(self.argument("checkpoint"), folder)

    def result(self, spec: TaskSpec, outcome: TaskOutcome) -> TrainResult:
        left, newest, training = outcome.result or {}, outcome.checkpoint, outcome.training
        checkpoint = left.get("checkpoint") or (newest["checkpoint"] if newest else "")
        progress = outcome.progress
        step, epoch = (progress.step, progress.epoch) if progress else (0, 0)
        if newest and newest["checkpoint"] == checkpoint:  # else the script has written its own
            step, epoch = newest["step"], newest["epoch"]
        if outcome.ended == "stopped":
            self.log.warning("%r: %s", spec.name, outcome.reason)
        return TrainResult(
            job=spec.name,
            checkpoint=checkpoint,
            step=step,
            epoch=epoch,
            metrics={**(newest["metrics"] if newest else {}), **left.get("metrics", {})},
            not_finite=left.get("not_finite", {}),
            stopped=outcome.ended == "stopped" or bool(training and training.ended == "stopped"),
            reason=outcome.reason or (training.reason if training else ""),
            instances=training.instances if training else 0,
            generations=outcome.generations,
        )

    def _ends_at(self, start: datetime, run: Any) -> float | None:
        if self.ends_by is None:
            return None
        zone = self.dag.timezone if self.has_dag() else UTC  # type: ignore[no-untyped-call]
        due = run.run_after if run and run.run_type == SCHEDULED else None
        return deadline_of(self.ends_by, start=start, due=due, zone=zone).timestamp()


def _named(jobs: Sequence[TrainingJob], name: str) -> TrainingJob:
    names = [job.name for job in jobs]
    if name in names:
        return jobs[names.index(name)]
    if name or len(jobs) > 1:
        raise SpecError("name", name, f"one of the TrainingJobs in the manifest: {', '.join(map(repr, names))}")
    return jobs[0]
