"""A user's specs → the jobs that a backend runs. Pure: the same task instance makes the same jobs on every try."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from edl_runtime.elastic.agent.launch import elastic_job
from edl_runtime.elastic.comm.agent_protocol import Gear
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, Checkpoint, JobSpec, TeacherSpec, TrainerSpec

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A Python callable, `package.module:function`."""


def pool_job_spec(
    pool: str,
    teacher: TeacherSpec,
    bounds: Bounds,
    *,
    namespace: str,
    folder: Path | None,
    priority: int = 0,
    weight: float = 1.0,
) -> JobSpec:
    """Return the job whose instances are the pool's teachers, `bounds.min` of them to begin with.

    A relative model path is one below `folder`, where the teachers also start, so that `module:function` finds a
    module that lies there; -P, so that no file there takes the place of a library. None: what instances have is not
    this machine's, so paths stay as they are.
    """
    words = [
        "python",
        "-P",
        "-m",
        "edl_runtime.cli",
        "teacher",
        "--model",
        model_path(teacher.model, folder),
        "--pool",
        pool,
    ]
    if teacher.outputs:
        words += ["--outputs", ",".join(teacher.outputs)]
    if teacher.gpu_ids:
        words += ["--gpu-ids", ",".join(map(str, teacher.gpu_ids))]
    if teacher.mem_optim:
        words.append("--mem-optim")
    words += ["--max-batch", str(teacher.max_batch)]
    words += ["--hung-after", f"{teacher.hung_after_s:g}"]
    settings = RuntimeSettings(namespace=namespace, job=pool)
    return JobSpec(
        name=pool,
        kind="pool",
        command=tuple(words),
        bounds=bounds,
        instances=bounds.min,
        env={**settings.to_env(), **teacher.env},
        cwd=str(folder or ""),
        serves_http=True,
        pod=teacher.pod,
        priority=priority,
        weight=weight,
    )


def trainer_job_spec(
    trainer: TrainerSpec,
    bounds: Bounds | None,
    *,
    settings: RuntimeSettings,
    folder: Path | None,
    gear: Gear = "live",
    checkpoint: Checkpoint | None = None,
    pool_digest: str = "",
    priority: int = 0,
    weight: float = 1.0,
) -> JobSpec:
    """Return the job `settings.job` that trains, with `settings` and the script's own variables.

    With `bounds` it is one of elastic trainers, `bounds.min` of them to begin with, each an `edl agent` that runs the
    script; without, it is the script as one process. A relative `cwd`, and a relative path of checkpoints, is one below
    `folder`, unless it begins with "~"; where there is none, a relative path of checkpoints is a SpecError.
    `pool_digest`: of the pool that the task runs for it, so that other teachers make another job.
    """
    spec = JobSpec(
        name=settings.job,
        kind="trainer",
        command=tuple(trainer.command),
        bounds=Bounds(1, 1),
        instances=1,
        env={**settings.to_env(), **(_below(checkpoint, folder).to_env() if checkpoint else {}), **trainer.env},
        cwd=local_path(trainer.cwd, folder) if trainer.cwd else "",
        pool_digest=pool_digest,
        pod=trainer.pod,
        priority=priority,
        weight=weight,
    )
    return spec if bounds is None else elastic_job(spec, bounds, gear=gear)


def _below(checkpoint: Checkpoint, folder: Path | None) -> Checkpoint:
    if "://" in checkpoint.url:
        return checkpoint
    if folder is None and not checkpoint.url.startswith("/"):
        allowed = "a URL, or an absolute path on a volume that all pods have: see `volumes` of Pod"
        raise SpecError("checkpoint.url", checkpoint.url, allowed)
    return msgspec.structs.replace(checkpoint, url=local_path(checkpoint.url, folder))


def model_path(model: str, folder: Path | None) -> str:
    """Return a teacher's model as its process has it: a path below `folder`, unless it is none or a URL or function."""
    if "://" in model or _FUNCTION.fullmatch(model):
        return model
    return local_path(model, folder)


def local_path(path: str, folder: Path | None) -> str:
    """Return `path` as one below `folder`; as it is where there is no folder."""
    return str(folder / Path(path).expanduser()) if folder else path
