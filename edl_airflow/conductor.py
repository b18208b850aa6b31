"""Does a task's work: wait for the pool, start the student, follow it. Workers and triggerers run the same code.

`decide` is pure; `begin` and `conduct` look, ask it and act. All of it can be done again from the start (by another
triggerer, by the next try) and finds what is there already.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import msgspec

from edl_airflow.work import Outcome, Work
from edl_runtime.backends.base import Backend, JobStatus
from edl_runtime.errors import EX_CONFIG, RegistryUnavailableError, UnknownJobError
from edl_runtime.progress import Progress

LOOK_EVERY_S = 0.5
"""Seconds between two looks at what the work waits for."""

Say = Callable[[str], None]


class Site(Protocol):
    """Where the work is done: what a connection leads to."""

    @property
    def backend(self) -> Backend: ...

    @property
    def secrets(self) -> Mapping[str, str]:
        """Environment variables for instances that are never written down."""
        ...

    async def teachers(self, pool: str) -> list[str]:
        """Return the addresses of the registered teachers. Raises RegistryUnavailableError."""
        ...

    async def progress(self, job: str) -> Progress | None:
        """Return the job's last report. Raises RegistryUnavailableError."""
        ...


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
        if job and job.token != work.token:
            return Outcome(ended="taken_over", name=job.name)
    decision = _follow(work, view.student) if view.student or view.started else _gather(work, view, now)
    if not isinstance(decision, Outcome) and work.deadline is not None and now >= work.deadline:
        return Outcome(ended="timed_out", name=name_of(work))
    return decision


def _gather(work: Work, view: View, now: float) -> Decision:
    if work.pool_job and not view.pool:
        return _removed(work.pool)
    if view.pool and view.pool.phase == "failed":
        return failure(view.pool)
    teachers = view.teachers or ()
    if len(teachers) >= work.at_least:
        return "start_student" if work.student_job else Outcome(ended="ready", name=work.pool, teachers=teachers)
    if now >= work.pool_deadline:
        return Outcome(ended="no_teacher", name=work.pool, reason=_lack(work, view))
    return "wait"


def _follow(work: Work, student: JobStatus | None) -> Decision:
    if not student:
        return _removed(name_of(work))
    if student.phase == "failed":
        return failure(student)
    if student.phase == "succeeded":
        return Outcome(ended="succeeded", name=student.name, result=student.result)
    return "wait"


def failure(job: JobStatus) -> Outcome:
    """Return how the work ends when this job or pool has failed."""
    codes = {instance.exit_code for instance in job.instances if instance.phase == "failed"}
    return Outcome(
        ended="failed",
        name=job.name,
        reason=job.reason or "for no reason that the backend knows",
        last_lines=job.last_lines,
        permanent=EX_CONFIG in codes,
    )


def _removed(name: str) -> Outcome:
    return Outcome(ended="failed", name=name, reason="somebody has removed it while it was running")


def _lack(work: Work, view: View) -> str:
    if view.teachers is None:
        return "Redis does not answer"
    return f"{len(view.teachers)} of the {work.at_least} wanted are registered"


def name_of(work: Work) -> str:
    """Return the name of what the work is mainly about."""
    return work.student_job.name if work.student_job else work.pool


async def begin(work: Work, site: Site) -> Outcome | None:
    """Start what can be started at once, taking over what an earlier try left, and look once.

    Only for the first half of a try: it makes this try's token the owner. Returns the outcome if the work has
    ended already. Raises what the registry and the backend raise.
    """
    await site.teachers(work.pool)  # a Redis that is away is an error now, and an outage to ride out once we have begun
    adopted = False
    if work.student_job:
        earlier = await job_status(site, work.student_job.name)
        adopted = bool(earlier and earlier.digest == work.student_job.digest and earlier.phase != "failed")
        if earlier and not adopted:
            await site.backend.delete(earlier.name)
    if work.pool_job:
        await site.backend.submit(work.pool_job, token=work.token, secrets=site.secrets)
    if work.student_job and adopted:
        await site.backend.submit(work.student_job, token=work.token, secrets=site.secrets)
    view = await _look(work, site, started=adopted)
    decision = decide(work, view, time.time())
    return await _ended(decision, view, site) if isinstance(decision, Outcome) else None


async def conduct(work: Work, site: Site, say: Say) -> Outcome:
    """Go on until the work has ended, logging progress with `say`.

    Rides out a Redis that is away: the training goes on, and the backend tells when it ends. Raises BackendError.
    """
    teller = _Teller(work, say)
    started = False
    while True:
        view = await _look(work, site, started=started)
        started = view.started
        decision = decide(work, view, time.time())
        if isinstance(decision, Outcome):
            return await _ended(decision, view, site)
        if decision == "start_student" and work.student_job:
            await site.backend.submit(work.student_job, token=work.token, secrets=site.secrets)
            say(f"Started the student {work.student_job.name!r}")
            started = True
            continue
        await teller.tell(view, site)
        await asyncio.sleep(LOOK_EVERY_S)


async def stop(work: Work, site: Site) -> None:
    """End everything that carries this try's token, student and pool at the same time; their logs are kept."""
    names = [job.name for job in (work.student_job, work.pool_job) if job]
    await asyncio.gather(*(site.backend.delete(name, token=work.token) for name in names))


class _Teller:
    """Says how far the work is: each line once, progress no more often than asked for."""

    def __init__(self, work: Work, say: Say) -> None:
        self._work = work
        self._say = say
        self._said = ""
        self._reported_at = 0.0
        self._next_at = 0.0

    async def tell(self, view: View, site: Site) -> None:
        if not view.student:
            self._say_once(f"Waiting for teachers of pool {self._work.pool!r}: {_lack(self._work, view)}")
        elif time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + self._work.progress_every_s
            await self._tell_progress(view.student, site)

    async def _tell_progress(self, student: JobStatus, site: Site) -> None:
        try:
            progress = await _latest(student, site)
        except RegistryUnavailableError as error:
            self._say_once(f"{error}. The training goes on without progress shown here")
            return
        if progress and progress.updated_at > self._reported_at:
            self._reported_at = progress.updated_at
            self._say_once(progress.line())

    def _say_once(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self._say(line)


async def _look(work: Work, site: Site, *, started: bool) -> View:
    student = await job_status(site, work.student_job.name) if work.student_job else None
    if student or started:
        return View(student=student, started=True)
    pool = await job_status(site, work.pool)
    try:
        return View(pool=pool, teachers=tuple(await site.teachers(work.pool)))
    except RegistryUnavailableError:
        return View(pool=pool, teachers=None)


async def job_status(site: Site, name: str) -> JobStatus | None:
    """Return what the backend knows of the job or pool, None if nothing."""
    try:
        return await site.backend.get(name)
    except UnknownJobError:
        return None


async def _latest(student: JobStatus, site: Site) -> Progress | None:
    """Return the last report of this run of the job; an earlier run's may still lie in Redis."""
    progress = await site.progress(student.name)
    return progress if progress and progress.updated_at >= student.created_at else None


async def _ended(outcome: Outcome, view: View, site: Site) -> Outcome:
    if not view.student:
        return outcome
    try:
        progress = await _latest(view.student, site)
    except RegistryUnavailableError:
        return outcome
    return msgspec.structs.replace(outcome, answered=progress.answered) if progress else outcome
