"""Makes jobs for a backend from a user's specs. Pure: every try of a task instance makes the same jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edl_runtime.elastic.agent.entrypoint import elastic_job
from edl_runtime.elastic.comm.agent_protocol import Gear
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, Checkpoint, JobSpec, TeacherSpec, TrainerSpec, check_name

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
    """Return the job whose instances are the pool's teachers; it starts with `bounds.min`.

    A relative model path starts from `folder`, which is also the teachers' working folder, so that `module:function`
    finds a module there. `folder` is None for pods, which have other files; paths stay as they are.
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


def registration_job(pool: str) -> str:
    """Return the name of the job that keeps other people's servers in a pool."""
    return f"{pool}-servers"


def registration_job_spec(pool: str, servers: Sequence[str], *, namespace: str) -> JobSpec:
    """Return the job that keeps servers in a pool: one process, restarted when it ends. Raises SpecError."""
    job = check_name("teacher_pool with '-servers' behind it", registration_job(pool))
    words = ["python", "-P", "-m", "edl_runtime.cli", "register", "--pool", pool]
    return JobSpec(
        name=job,
        kind="pool",
        command=(*words, *(word for server in servers for word in ("--server", server))),
        bounds=Bounds(1, 1),
        instances=1,
        env=RuntimeSettings(namespace=namespace, job=job, pool=pool).to_env(),
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

    With `bounds` it has elastic trainers, each an `edl agent` that runs the script, and starts with `bounds.min`;
    without, it is the script as one process. A relative `cwd` or checkpoint path starts from `folder`; without a folder
    a relative checkpoint path is a SpecError. `pool_digest`: of the task's own pool, so that a change of its teachers
    makes another job.
    """
    settings = msgspec.structs.replace(settings, not_finite=trainer.not_finite)
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
    """Return a teacher's model for its process: a URL or function as it is, a path as one below `folder`."""
    if "://" in model or _FUNCTION.fullmatch(model):
        return model
    return local_path(model, folder)


def local_path(path: str, folder: Path | None) -> str:
    """Return `path` below `folder`, unless it is absolute or begins with "~"; as it is without a folder."""
    return str(folder / Path(path).expanduser()) if folder else path
