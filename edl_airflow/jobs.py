"""A user's specs → the jobs that a backend runs. Pure: the same task instance makes the same jobs on every try."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from edl_runtime.elastic.messages import Gear
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, Checkpoint, JobSpec, TeacherSpec, TrainerSpec

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A Python callable, `package.module:function`."""


def pool_job(pool: str, teacher: TeacherSpec, bounds: Bounds, *, namespace: str, folder: Path) -> JobSpec:
    """Return the job whose instances are the pool's teachers, `bounds.min` of them to begin with.

    A relative model path is one below `folder`, where the teachers also start, so that `module:function` finds a
    module that lies there; -P, so that no file there takes the place of a library.
    """
    words = [
        "python",
        "-P",
        "-m",
        "edl_runtime.cli",
        "teacher",
        "--model",
        _model(teacher.model, folder),
        "--pool",
        pool,
    ]
    if teacher.outputs:
        words += ["--outputs", ",".join(teacher.outputs)]
    if teacher.gpu_ids:
        words += ["--gpu_ids", ",".join(map(str, teacher.gpu_ids))]
    if teacher.mem_optim:
        words.append("--mem_optim")
    words += ["--max_batch", str(teacher.max_batch)]
    words += ["--hung_after", f"{teacher.hung_after_s:g}"]
    settings = RuntimeSettings(namespace=namespace, job=pool)
    return JobSpec(
        name=pool,
        kind="pool",
        command=tuple(words),
        bounds=bounds,
        instances=bounds.min,
        env={**settings.to_env(), **teacher.env},
        cwd=str(folder),
    )


def student_job(
    name: str,
    student: TrainerSpec,
    *,
    pool: str,
    pool_digest: str,
    namespace: str,
    teacher_wait_s: float,
    folder: Path,
) -> JobSpec:
    """Return the job that trains the student, one process. A relative `cwd` is one below `folder`.

    `pool_digest`: of the pool that the task runs for it, so that other teachers make another job; "" without.
    """
    settings = RuntimeSettings(namespace=namespace, job=name, pool=pool, teacher_wait_s=teacher_wait_s)
    return JobSpec(
        name=name,
        kind="trainer",
        command=tuple(student.command),
        bounds=Bounds(1, 1),
        instances=1,
        env={**settings.to_env(), **student.env},
        cwd=_cwd(student, folder),
        pool_digest=pool_digest,
    )


def trainer_job(
    name: str,
    trainer: TrainerSpec,
    bounds: Bounds,
    *,
    gear: Gear,
    checkpoint: Checkpoint | None,
    stream: str,
    namespace: str,
    folder: Path,
) -> JobSpec:
    """Return the job of elastic trainers, `bounds.min` of them to begin with, each an `edl agent` that runs the script.

    A relative `cwd`, and a relative path of checkpoints, is one below `folder`. `stream`: where checkpoints are told
    when they land. The agents start with -P, so that no file in their folder takes the place of a library.
    """
    settings = RuntimeSettings(namespace=namespace, job=name, checkpoint_stream=stream)
    words = ["python", "-P", "-m", "edl_runtime.cli", "agent", "--instances", str(bounds), "--gear", gear, "--"]
    return JobSpec(
        name=name,
        kind="trainer",
        command=(*words, *trainer.command),
        bounds=bounds,
        instances=bounds.min,
        env={**settings.to_env(), **(_below(checkpoint, folder).to_env() if checkpoint else {}), **trainer.env},
        cwd=_cwd(trainer, folder),
    )


def _cwd(trainer: TrainerSpec, folder: Path) -> str:
    """Return the folder to start in; empty for one of the job's own."""
    return str(folder / trainer.cwd) if trainer.cwd else ""


def _below(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    if "://" in checkpoint.url:
        return checkpoint
    return msgspec.structs.replace(checkpoint, url=str(folder / checkpoint.url))


def _model(model: str, folder: Path) -> str:
    if "://" in model or _FUNCTION.fullmatch(model):
        return model
    return str(folder / model)
