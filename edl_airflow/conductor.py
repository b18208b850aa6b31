"""Does a task's work: wait for the pool, start the student, follow it. Workers and triggerers run the same code.

`begin` and `conduct` look, ask `decide` and act. All of it can be done again from the start (by another triggerer,
by the next try) and finds what is there already.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from edl_airflow.decisions import Decision, View, decide
from edl_airflow.telling import Say, Teller, latest
from edl_airflow.work import Outcome, Work
from edl_runtime.backends.base import Backend, JobStatus, owner_of, refuse_strangers
from edl_runtime.errors import RegistryUnavailableError, UnknownJobError
from edl_runtime.progress import Progress

LOOK_EVERY_S = 0.5
"""Seconds between two looks at what the work waits for."""


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


async def begin(work: Work, site: Site) -> Outcome | None:
    """Start what can be started at once, taking over what an earlier try left, and look once.

    Only for the first half of a try: it makes this try's token the owner. Returns the outcome if the work has
    ended already. Raises what the registry and the backend raise; `stop_all_tries` then leaves nothing.
    """
    adopted = await _adopts_student(work, site.backend)
    if not adopted:
        await site.teachers(work.pool)  # a Redis that is away is an error now, and an outage to ride out later
    if work.pool_job:
        await site.backend.submit(work.pool_job, token=work.token, secrets=site.secrets)
    if work.student_job and adopted:
        await site.backend.submit(work.student_job, token=work.token, secrets=site.secrets)
    view = await _look(work, site, started=adopted)
    decision: Decision = decide(work, view, time.time())
    return await _ended(decision, view, site) if isinstance(decision, Outcome) else None


async def conduct(work: Work, site: Site, say: Say) -> Outcome:
    """Go on until the work has ended, logging progress with `say`.

    Rides out a Redis that is away: the training goes on, and the backend tells when it ends. Raises BackendError.
    """
    teller = Teller(work, say)
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


async def stop(work: Work, backend: Backend) -> None:
    """End everything that carries this try's token, student and pool at the same time; their logs are kept."""
    names = [job.name for job in (work.student_job, work.pool_job) if job]
    await asyncio.gather(*(backend.delete(name, token=work.token) for name in names))


async def stop_all_tries(owner: str, backend: Backend) -> None:
    """End everything of a task instance, whichever try it is from: for a try that fails before it can take it over."""
    left = [job for job in await backend.list() if owner_of(job.token) == owner]
    await asyncio.gather(*(backend.delete(job.name, token=job.token) for job in left))


async def job_status(backend: Backend, name: str) -> JobStatus | None:
    """Return what the backend knows of the job or pool, None if nothing."""
    try:
        return await backend.get(name)
    except UnknownJobError:
        return None


async def _adopts_student(work: Work, backend: Backend) -> bool:
    """Return whether an earlier try's student is as good as a new one; stop it if it is not."""
    earlier = await job_status(backend, work.student_job.name) if work.student_job else None
    if not earlier or not work.student_job:
        return False
    if earlier.digest == work.student_job.digest and earlier.phase != "failed":
        return True
    refuse_strangers(earlier, work.token)
    await backend.delete(earlier.name)
    return False


async def _look(work: Work, site: Site, *, started: bool) -> View:
    student = await job_status(site.backend, work.student_job.name) if work.student_job else None
    started = started or student is not None
    pool = await job_status(site.backend, work.pool) if work.pool_job or not started else None
    if started:
        return View(pool=pool, student=student, started=True)
    try:
        return View(pool=pool, teachers=tuple(await site.teachers(work.pool)))
    except RegistryUnavailableError:
        return View(pool=pool, teachers=None)


async def _ended(outcome: Outcome, view: View, site: Site) -> Outcome:
    if not view.student:
        return outcome
    try:
        progress = await latest(view.student, site)
    except RegistryUnavailableError:
        return outcome
    return msgspec.structs.replace(outcome, answered=progress.answered) if progress else outcome
