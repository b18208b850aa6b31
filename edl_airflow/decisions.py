"""What a task does next, and how its work has ended. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from edl_airflow.work import Outcome, Training, Work
from edl_runtime.backends.base import JobStatus, owner_of

TRAINED = "it has trained all that it was to train"
REMOVED = "somebody has stopped it while it was running, as with `edl stop`; clear the task to start it again"


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What there is now. `teachers` is None while Redis is away, a job None while the backend knows none.

    `started`: the trainer job has been seen or started, so its absence means that somebody removed it. `asked_at`: when
    the job was first asked to end, or that was tried at least; None before.
    """

    pool: JobStatus | None = None
    trainer: JobStatus | None = None
    teachers: tuple[str, ...] | None = ()
    started: bool = False
    asked_at: float | None = None


Decision = Outcome | Literal["wait", "start_trainer", "end_trainer"]


def decide(work: Work, view: View, now: float) -> Decision:
    """Return what to do next, or how the work has ended.

    `end_trainer` is to ask the job to end with a checkpoint; it comes until the job has, or its grace is over.
    """
    for job in (view.pool if work.pool_job else None, view.trainer):
        if job and job.token != work.token and owner_of(job.token) == owner_of(work.token):
            return Outcome(ended="taken_over", name=job.name)
    decision = _follow(work, view, now) if view.trainer or view.started else _start(work, view, now)
    if not isinstance(decision, Outcome) and work.deadline is not None and now >= work.deadline:
        return Outcome(ended="timed_out", name=work.name)
    return decision


def failure(job: JobStatus) -> Outcome:
    """Return how the work ends when this job or pool has failed, or can't have the instances that it needs."""
    return Outcome(
        ended="failed",
        name=job.name,
        reason=job.reason or "for no reason that the backend knows",
        last_lines=job.last_lines,
        permanent=job.is_hopeless,
        passing=job.is_disrupted,
    )


def doubts(work: Work, outcome: Outcome) -> list[str]:
    """Return what is odd about a training that has succeeded, each as a line for the task's log.

    Empty for a pool, and for what can't be known because Redis was away at the end. A script that never calls our
    library is fine where one instance runs it.
    """
    if not work.trainer_job or outcome.ended != "succeeded":
        return []
    found = []
    if not outcome.result and not outcome.landed:
        found.append(
            f"{work.name!r} has succeeded and left nothing, so that this task returns no checkpoint and no metrics: "
            "its script leaves them by `edl_runtime.result.write_result`"
        )
    count = outcome.training.instances if outcome.training else 0
    if work.trainer_job.elastic and count > 1 and not outcome.progress:
        found.append(
            f"{work.name!r} has succeeded without a step of elastic training: unless nothing was left to train, or its "
            "instances share the work by other means, its script never calls `elastic.init` and `run.step`, and each "
            f"of the {count} instances has run all of it, side by side"
        )
    return found


def ended_unseen(name: str, training: Training | None, since: float) -> Outcome | None:
    """Return how a job has ended that the backend does not know any more, by what its agents left in Redis.

    None if they left nothing, or before `since` (Unix seconds): that was an earlier job of this name.
    """
    if not training or not training.ended or training.heard_at < since:
        return None
    if training.ended == "failed":
        return Outcome(ended="failed", name=name, reason=training.reason)
    return Outcome(ended="gone", name=name, reason=TRAINED)


def is_hopeless(pool: JobStatus, at_least: int) -> bool:
    """Whether `at_least` teachers can't come any more, since instances were given up."""
    return pool.attainable < min(at_least, pool.wanted)


def lack(work: Work, view: View) -> str:
    """Say what the wait for teachers is waiting for."""
    if view.teachers is None:
        return "Redis does not answer"
    if view.pool and view.pool.is_suspended:
        return "the pool is suspended"
    return f"{len(view.teachers)} of the {work.at_least} wanted are registered"


def _start(work: Work, view: View, now: float) -> Decision:
    if work.ends_at is not None and now >= work.ends_at:
        if work.began_at >= work.ends_at:
            return Outcome(ended="too_late", name=work.name, reason="the time to train was over before the run began")
        return Outcome(ended="stopped", name=work.name, reason="the time to train was over before it could begin")
    return _gather(work, view, now) if work.pool else "start_trainer"


def _gather(work: Work, view: View, now: float) -> Decision:
    pool, teachers = view.pool, view.teachers or ()
    if work.pool_job and not (pool and pool.token == work.token):
        return _removed(work.pool)
    if pool and pool.phase == "failed":
        return failure(pool)
    if len(teachers) >= work.at_least:
        return "start_trainer" if work.trainer_job else Outcome(ended="ready", name=work.pool, teachers=teachers)
    if pool and is_hopeless(pool, work.at_least):
        return failure(pool)
    if not (pool and pool.is_suspended) and now >= _deadline(work, pool):
        return Outcome(ended="no_teacher", name=work.pool, reason=lack(work, view))
    return "wait"


def _deadline(work: Work, pool: JobStatus | None) -> float:
    """Return until when teachers are waited for; those of a pool that was resized since have that long from then on."""
    resized_at = pool.scaling.resized_at if pool and pool.scaling else None
    return max(work.pool_deadline, resized_at + work.waits_s) if resized_at else work.pool_deadline


def _follow(work: Work, view: View, now: float) -> Decision:
    job = view.trainer
    if not job or job.token != work.token:
        return _removed(work.name)
    if job.phase == "failed":
        return _with_the_pools(failure(job), work, view.pool)
    if job.phase == "succeeded":
        return Outcome(ended="succeeded", name=job.name, result=job.result)
    if work.ends_at is None or now < work.ends_at:
        return "wait"
    return _end(work, job, view.asked_at, now)


def _end(work: Work, job: JobStatus, asked_at: float | None, now: float) -> Decision:
    """Return what to do with a job whose time to train is over. One that is suspended has left its checkpoint."""
    reason = f"it did not end by itself within {work.stop_grace_s:.0f} s of being asked to"
    if job.is_suspended and not job.instances:
        reason = "it was suspended when its time to train was over"
    elif asked_at is None or now < asked_at + work.stop_grace_s:
        return "end_trainer"
    return Outcome(ended="stopped", name=job.name, result=job.result, reason=reason)


def _with_the_pools(outcome: Outcome, work: Work, pool: JobStatus | None) -> Outcome:
    """Add what is wrong with the pool: a student that finds no teacher does not know why."""
    if work.pool_job and not pool:
        reason = f"{outcome.reason}; its pool {work.pool!r}: {REMOVED}"
        return msgspec.structs.replace(outcome, reason=reason, permanent=True)
    if not pool or not pool.reason:
        return outcome
    said = (f"the last lines of pool {pool.name!r}:", *pool.last_lines) if pool.last_lines else ()
    return msgspec.structs.replace(
        outcome,
        reason=f"{outcome.reason}; its pool {pool.name!r}: {pool.reason}",
        last_lines=(*outcome.last_lines, *said),
        permanent=outcome.permanent or (pool.phase == "failed" and failure(pool).permanent),
    )


def _removed(name: str) -> Outcome:
    """Return how the work ends when a person has ended it: a retry would start again what that person has stopped."""
    return Outcome(ended="failed", name=name, reason=REMOVED, permanent=True)
