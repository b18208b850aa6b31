"""Decides a task's next step, and its outcome. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from edl_airflow.runtime.spec import TaskOutcome, TaskSpec, TrainingStatus
from edl_runtime.backends.interface import JobStatus, token_owner

FINISHED_REASON = "it has trained all that it was to train"
REMOVED_REASON = "somebody has stopped it while it was running, as by `edl stop`; clear the task to start it again"


class TaskState(msgspec.Struct, frozen=True, kw_only=True):
    """The observed state. `teachers` is None while Redis is away, a job None while the backend has none.

    `other_pools`: if nobody knows the pool, which others there are, in words.

    `started`: the trainer job was started, so if it is missing somebody has removed it. `asked_at`: when a request to
    end was first sent to the job, or failed to be; None before.
    """

    pool: JobStatus | None = None
    trainer: JobStatus | None = None
    teachers: tuple[str, ...] | None = ()
    other_pools: str = ""
    started: bool = False
    asked_at: float | None = None


Decision = TaskOutcome | Literal["wait", "start_trainer", "stop_trainer"]


def decide(spec: TaskSpec, view: TaskState, now: float) -> Decision:
    """Return the next step, or the outcome.

    `stop_trainer` asks the job to end with a checkpoint; it repeats until the job ends or its grace period is over.
    """
    for job in (view.pool if spec.pool_job else None, view.trainer):
        if job and job.token != spec.token and token_owner(job.token) == token_owner(spec.token):
            return TaskOutcome(ended="taken_over", name=job.name)
    decision = _follow(spec, view, now) if view.trainer or view.started else _start(spec, view, now)
    if not isinstance(decision, TaskOutcome) and spec.deadline is not None and now >= spec.deadline:
        return TaskOutcome(ended="timed_out", name=spec.name)
    return decision


def failed_outcome(job: JobStatus) -> TaskOutcome:
    """Return the outcome of a job or pool that has failed, or can't get the instances that it needs."""
    return TaskOutcome(
        ended="failed",
        name=job.name,
        reason=job.reason or "the backend gives no reason",
        last_lines=job.last_lines,
        permanent=job.failed_permanently,
        transient=job.is_disrupted,
    )


def unneeded_jobs(spec: TaskSpec, ended: str) -> tuple[str, ...]:
    """Return the names of the jobs that a task has no use for once its work has `ended` so.

    A training that has succeeded stays: if the task's worker is lost now, the next try takes its result.
    """
    if ended in ("ready", "taken_over"):
        return ()
    jobs = (spec.pool_job,) if ended == "succeeded" else (spec.trainer_job, spec.pool_job)
    return tuple(job.name for job in jobs if job)


def result_warnings(spec: TaskSpec, outcome: TaskOutcome) -> list[str]:
    """Return warnings about a training that has succeeded, each as a line for the task's log.

    Empty for a pool. A single instance may run a script that never calls our library.
    """
    if not spec.trainer_job or outcome.ended != "succeeded":
        return []
    found = []
    if not outcome.result and not outcome.checkpoint:
        found.append(
            f"{spec.name!r} has succeeded and left nothing, so that this task returns no checkpoint and no metrics: "
            "its script leaves them by `edl_runtime.result.write_result`"
        )
    count = outcome.training.instances if outcome.training else 0
    if spec.trainer_job.elastic and count > 1 and not outcome.progress:
        found.append(
            f"{spec.name!r} has succeeded without a step of elastic training: unless nothing was left to train, or its "
            "instances share the work by other means, its script never calls `elastic.init` and `run.step`, and each "
            f"of the {count} instances has run all of it, side by side"
        )
    return found


def outcome_from_registry(name: str, training: TrainingStatus | None, since: float) -> TaskOutcome | None:
    """Return the outcome of a job that the backend does not know any more, by its agents' records in Redis.

    None without records, or with those from before `since` (Unix seconds), which belong to an earlier job of this name.
    """
    if not training or not training.ended or training.heard_at < since:
        return None
    if training.ended == "failed":
        return TaskOutcome(ended="failed", name=name, reason=training.reason)
    return TaskOutcome(ended="gone", name=name, reason=FINISHED_REASON)


def is_unreachable(pool: JobStatus, at_least: int) -> bool:
    """Whether too many instances were given up for `at_least` teachers to register."""
    return pool.attainable < min(at_least, pool.wanted)


def missing_teachers(spec: TaskSpec, view: TaskState) -> str:
    """Return what the wait for teachers is waiting for, in words."""
    if view.teachers is None:
        return "Redis does not answer"
    if view.pool and view.pool.is_suspended:
        return "the pool is suspended"
    found = f"{len(view.teachers)} of {spec.at_least} are registered"
    if view.other_pools:
        return unknown_pool(view.other_pools)
    if view.pool and not view.pool.reason:
        return f"{found}; {still_loading(view.pool.name)}"
    return found


def unknown_pool(others: str) -> str:
    """Return what is missing where nobody knows the pool. `others`: those that there are, in words."""
    return f"no pool of that name is known, and {others}"


def still_loading(pool: str) -> str:
    """Return what to do about teachers that run and are not registered."""
    return f"`edl logs {pool}` shows whether others still load; a longer `wait_timeout_s`, or sensor's `timeout`, helps"


def _start(spec: TaskSpec, view: TaskState, now: float) -> Decision:
    if spec.ends_at is not None and now >= spec.ends_at:
        if spec.began_at >= spec.ends_at:
            return TaskOutcome(
                ended="too_late", name=spec.name, reason="the time to train was over before the run began"
            )
        return TaskOutcome(ended="stopped", name=spec.name, reason="the time to train was over before it could begin")
    return _gather(spec, view, now) if spec.pool else "start_trainer"


def _gather(spec: TaskSpec, view: TaskState, now: float) -> Decision:
    pool, teachers = view.pool, view.teachers or ()
    if spec.pool_job and not (pool and pool.token == spec.token):
        return _removed(spec.pool)
    if pool and pool.phase == "failed":
        return failed_outcome(pool)
    if len(teachers) >= spec.at_least:
        return "start_trainer" if spec.trainer_job else TaskOutcome(ended="ready", name=spec.pool, teachers=teachers)
    if pool and is_unreachable(pool, spec.at_least):
        return failed_outcome(pool)
    if not (pool and pool.is_suspended) and now >= _deadline(spec, pool):
        reasons = (missing_teachers(spec, view), pool.reason if pool else "")
        ended: Literal["no_pool", "no_teacher"] = "no_pool" if view.other_pools else "no_teacher"
        return TaskOutcome(ended=ended, name=spec.pool, reason="; ".join(filter(None, reasons)))
    return "wait"


def _deadline(spec: TaskSpec, pool: JobStatus | None) -> float:
    """Return the deadline for teachers, which starts again when the pool is resized."""
    resized_at = pool.scaling.resized_at if pool and pool.scaling else None
    return max(spec.pool_deadline, resized_at + spec.wait_timeout_s) if resized_at else spec.pool_deadline


def _follow(spec: TaskSpec, view: TaskState, now: float) -> Decision:
    job = view.trainer
    if not job or job.token != spec.token:
        return _removed(spec.name)
    if job.phase == "failed":
        return _with_pool_reason(failed_outcome(job), spec, view.pool)
    if job.phase == "succeeded":
        return TaskOutcome(ended="succeeded", name=job.name, result=job.result)
    if spec.ends_at is None or now < spec.ends_at:
        return "wait"
    return _end(spec, job, view.asked_at, now)


def _end(spec: TaskSpec, job: JobStatus, asked_at: float | None, now: float) -> Decision:
    """Return the next step for a job whose time to train is over. A suspended one has written its checkpoint."""
    reason = f"it did not end by itself within {spec.stop_grace_s:.0f} s of being asked to"
    if job.is_suspended and not job.instances:
        reason = "it was suspended when its time to train was over"
    elif asked_at is None or now < asked_at + spec.stop_grace_s:
        return "stop_trainer"
    return TaskOutcome(ended="stopped", name=job.name, result=job.result, reason=reason)


def _with_pool_reason(outcome: TaskOutcome, spec: TaskSpec, pool: JobStatus | None) -> TaskOutcome:
    """Add the pool's failure: the student itself only knows that no teacher answers."""
    if spec.pool_job and not pool:
        reason = f"{outcome.reason}; its pool {spec.pool!r}: {REMOVED_REASON}"
        return msgspec.structs.replace(outcome, reason=reason, permanent=True)
    if not pool or not pool.reason:
        return outcome
    pool_lines = (f"the last lines of pool {pool.name!r}:", *pool.last_lines) if pool.last_lines else ()
    return msgspec.structs.replace(
        outcome,
        reason=f"{outcome.reason}; its pool {pool.name!r}: {pool.reason}",
        last_lines=(*outcome.last_lines, *pool_lines),
        permanent=outcome.permanent or (pool.phase == "failed" and failed_outcome(pool).permanent),
    )


def _removed(name: str) -> TaskOutcome:
    """Return the outcome of work that a person has stopped; it is permanent, as a retry would start it again."""
    return TaskOutcome(ended="failed", name=name, reason=REMOVED_REASON, permanent=True)
