"""Does a task's work: wait for the pool, start to train, follow it. Workers and triggerers run the same code.

`begin` and `conduct` look, ask `decide` and act. All of it can be done again from the start (by another triggerer,
by the next try) and finds what is there already.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from edl_airflow.decisions import View, decide
from edl_airflow.joblog import Position
from edl_airflow.telling import Say, Teller, latest
from edl_airflow.work import LandedCheckpoint, Outcome, Training, Work
from edl_runtime.backends.base import Backend, JobStatus, owner_of, refuse_strangers
from edl_runtime.errors import RegistryUnavailableError, UnknownJobError
from edl_runtime.progress import Progress

clock = time.time
"""Unix seconds: when the time to train, and the task's own, is over."""

LOOK_EVERY_S = 0.5
"""Seconds between two looks at what the work waits for."""


class Site(Protocol):
    """Where the work is done: what a connection leads to. All but the backend raises RegistryUnavailableError."""

    @property
    def backend(self) -> Backend: ...

    @property
    def secrets(self) -> Mapping[str, str]:
        """Environment variables for instances that are never written down."""
        ...

    async def teachers(self, pool: str) -> list[str]:
        """Return the addresses of the registered teachers."""
        ...

    async def progress(self, job: str) -> Progress | None:
        """Return the job's last report."""
        ...

    async def training(self, job: str) -> Training | None:
        """Return what the job's agents have agreed on, None if there are none."""
        ...

    async def checkpoint(self, stream: str, job: str, since: float) -> LandedCheckpoint | None:
        """Return the last checkpoint of the job that has landed in the stream and was not complete before `since`."""
        ...

    async def generations(self, job: str) -> int:
        """Return how many memberships of its trainers the job has had."""
        ...

    async def ask_to_end(self, job: str, reason: str) -> bool:
        """Ask a job's trainers to end with a checkpoint; False when there are none yet. The first reason counts."""
        ...

    async def begun_by(self, job: str) -> str:
        """Return the token of the try that has started the job last, empty for none."""
        ...

    async def keep_begun_by(self, job: str, token: str) -> None:
        """Keep that for whoever goes on."""
        ...

    async def log_position(self, job: str) -> Position | None:
        """Return how much of the job's log is in its task's log already."""
        ...

    async def keep_log_position(self, job: str, position: Position) -> None:
        """Keep that for whoever goes on."""
        ...


async def begin(work: Work, site: Site, check: Callable[[], None] | None = None) -> Outcome | Work:
    """Start what can be started at once, taking over what an earlier try left, and look once.

    Only for the first half of a try: it makes this try's token the owner. Returns the outcome if the work has
    ended already, else the work to go on with. Raises what the registry and the backend raise; `stop_all_tries` then
    leaves nothing.

    `check` raises for what is seen to be wrong before anything is started; what runs already is not checked.
    """
    adopted = await _adopts_trainers(work, site.backend)
    if not adopted:
        if check:
            await asyncio.to_thread(check)
        await site.progress(work.name)  # a Redis that is away is an error now, and an outage to ride out later
    if work.pool_job:
        await site.backend.submit(work.pool_job, token=work.token, secrets=site.secrets)
    if adopted:
        await _start(work, site)
    view = await _look(work, site, started=adopted)
    decision = decide(work, view, clock())
    if isinstance(decision, Outcome):
        return await _ended(work, decision, view, site)
    starts = decision == "start_trainer" and not work.pool
    if starts:
        await _start(work, site)
    return msgspec.structs.replace(work, begun=adopted or starts)


async def conduct(work: Work, site: Site, say: Say) -> Outcome:
    """Go on until the work has ended, logging progress and what the job writes with `say`.

    Trainers are started once in a try, also if the triggerer restarts: those that a person stops stay stopped. Rides
    out a Redis that is away: the training goes on, and the backend tells when it ends. Raises BackendError.
    """
    async with Teller(work, site, say) as teller:
        started = noted = work.begun
        told = False
        asked_at: float | None = None
        while True:
            view = msgspec.structs.replace(await _look(work, site, started=started), asked_at=asked_at)
            started = view.started
            noted = noted or (started and await _note_begun(work, site))
            decision = decide(work, view, clock())
            if isinstance(decision, Outcome):
                if decision.ended == "stopped":
                    await stop(work, site.backend)  # instances that leave write a checkpoint, which is the job's last
                await teller.finish(view, is_over=decision.ended != "timed_out")
                return await _ended(work, decision, view, site)
            if decision == "start_trainer":
                await _start(work, site)
                say(f"Started {work.name!r}")
                started = True
                continue
            if decision == "end_trainer":
                asked_at = asked_at or clock()
                if await _ask_to_end(work, site) and not told:
                    say(f"The time to train is over: {work.name!r} was asked to end with a checkpoint")
                    told = True
            await teller.tell(view)
            await asyncio.sleep(LOOK_EVERY_S)


async def stop(work: Work, backend: Backend) -> None:
    """End everything that carries this try's token, trainers and pool at the same time; their logs are kept."""
    await asyncio.gather(*(backend.delete(name, token=work.token) for name in work.jobs))


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


async def _start(work: Work, site: Site) -> None:
    if work.trainer_job:
        await site.backend.submit(work.trainer_job, token=work.token, secrets=site.secrets)


async def _adopts_trainers(work: Work, backend: Backend) -> bool:
    """Return whether an earlier try's training is as good as a new one; stop it if it is not."""
    earlier = await job_status(backend, work.trainer_job.name) if work.trainer_job else None
    if not earlier or not work.trainer_job:
        return False
    if earlier.digest == work.trainer_job.digest and earlier.phase != "failed":
        return True
    refuse_strangers(earlier, work.token)
    await backend.delete(earlier.name)
    return False


async def _look(work: Work, site: Site, *, started: bool) -> View:
    trainer = await job_status(site.backend, work.trainer_job.name) if work.trainer_job else None
    started = started or trainer is not None
    pool = await job_status(site.backend, work.pool) if work.pool_job or (work.pool and not started) else None
    if started or not work.pool:
        return View(pool=pool, trainer=trainer, started=started)
    try:
        if await site.begun_by(work.name) == work.token:
            return View(pool=pool, started=True)
        return View(pool=pool, teachers=tuple(await site.teachers(work.pool)))
    except RegistryUnavailableError:
        return View(pool=pool, teachers=None)


async def _note_begun(work: Work, site: Site) -> bool:
    """Keep that this try has started its trainers, for a triggerer that goes on; False while Redis is away."""
    try:
        await site.keep_begun_by(work.name, work.token)
    except RegistryUnavailableError:
        return False
    return True


async def _ask_to_end(work: Work, site: Site) -> bool:
    """Ask at each look: it may be heard by instances that are dead, and those that take their place know nothing."""
    try:
        return await site.ask_to_end(work.name, "its time to train is over")
    except RegistryUnavailableError:
        return False


async def _ended(work: Work, outcome: Outcome, view: View, site: Site) -> Outcome:
    """Add what Redis knows of how far the training came, if it answers."""
    since = view.trainer.created_at if view.trainer else work.began_at
    try:
        return msgspec.structs.replace(
            outcome,
            progress=await latest(view.trainer, site) if view.trainer else None,
            training=await site.training(work.name) if view.trainer else None,
            generations=await site.generations(work.name) if view.trainer else 0,
            landed=await site.checkpoint(work.stream, work.name, since) if work.stream else None,
        )
    except RegistryUnavailableError:
        return outcome
