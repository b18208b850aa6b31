"""What a task does next, and how its work has ended. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from edl_airflow.work import Outcome, Work
from edl_runtime.backends.base import JobStatus, owner_of
from edl_runtime.errors import EX_CONFIG


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What there is now. `teachers` is None while Redis is away, a job None while the backend knows none.

    `started`: the student has been seen or started, so its absence means that somebody removed it.
    """

    pool: JobStatus | None = None
    student: JobStatus | None = None
    teachers: tuple[str, ...] | None = ()
    started: bool = False


Decision = Outcome | Literal["wait", "start_student"]


def decide(work: Work, view: View, now: float) -> Decision:
    """Return what to do next, or how the work has ended."""
    for job in (view.pool if work.pool_job else None, view.student):
        if job and job.token != work.token and owner_of(job.token) == owner_of(work.token):
            return Outcome(ended="taken_over", name=job.name)
    decision = _follow(work, view) if view.student or view.started else _gather(work, view, now)
    if not isinstance(decision, Outcome) and work.deadline is not None and now >= work.deadline:
        return Outcome(ended="timed_out", name=name_of(work))
    return decision


def failure(job: JobStatus) -> Outcome:
    """Return how the work ends when this job or pool has failed, or can't have the instances that it needs."""
    codes = {instance.exit_code for instance in job.instances if instance.phase == "failed"}
    return Outcome(
        ended="failed",
        name=job.name,
        reason=job.reason or "for no reason that the backend knows",
        last_lines=job.last_lines,
        permanent=EX_CONFIG in codes,
    )


def is_hopeless(pool: JobStatus, at_least: int) -> bool:
    """Whether `at_least` teachers can't come any more, since instances were given up."""
    return pool.attainable < min(at_least, pool.wanted)


def name_of(work: Work) -> str:
    """Return the name of what the work is mainly about."""
    return work.student_job.name if work.student_job else work.pool


def lack(work: Work, view: View) -> str:
    """Say what the wait for teachers is waiting for."""
    if view.teachers is None:
        return "Redis does not answer"
    return f"{len(view.teachers)} of the {work.at_least} wanted are registered"


def _gather(work: Work, view: View, now: float) -> Decision:
    pool, teachers = view.pool, view.teachers or ()
    if work.pool_job and not (pool and pool.token == work.token):
        return _removed(work.pool)
    if pool and pool.phase == "failed":
        return failure(pool)
    if len(teachers) >= work.at_least:
        return "start_student" if work.student_job else Outcome(ended="ready", name=work.pool, teachers=teachers)
    if pool and is_hopeless(pool, work.at_least):
        return failure(pool)
    if now >= work.pool_deadline:
        return Outcome(ended="no_teacher", name=work.pool, reason=lack(work, view))
    return "wait"


def _follow(work: Work, view: View) -> Decision:
    student = view.student
    if not student or student.token != work.token:
        return _removed(name_of(work))
    if student.phase == "failed":
        return _with_the_pools(failure(student), view.pool)
    if student.phase == "succeeded":
        return Outcome(ended="succeeded", name=student.name, result=student.result)
    return "wait"


def _with_the_pools(outcome: Outcome, pool: JobStatus | None) -> Outcome:
    """Add what is wrong with the pool: a student that can't find a teacher does not know why."""
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
    return Outcome(ended="failed", name=name, reason="somebody has removed it while it was running")
