"""Runs a task's work: waits for the pool, starts the training, follows it. Workers and triggerers run the same code.

`start` and `run` observe, call `decide` and act. Another triggerer, or the next try, may do all of it again: it finds
what is running.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable

import msgspec

from edl_airflow.client import EdlClient, job_status
from edl_airflow.identity import is_retry
from edl_airflow.runtime.decisions import TaskState, decide
from edl_airflow.runtime.log import LogFunction, ProgressLogger, latest_progress
from edl_airflow.runtime.spec import TaskOutcome, TaskSpec
from edl_runtime.backends.interface import Backend, JobStatus, check_owner, token_owner
from edl_runtime.concurrency import all_ended
from edl_runtime.progress import Progress
from edl_runtime.specs import JobSpec
from edl_runtime.store.errors import RegistryUnavailableError

clock = time.time
"""Unix seconds, for deadlines."""

POLL_INTERVAL_S = 0.5
"""Seconds between two observations."""

EVACUATE_EVERY_S = 5.0
"""Seconds between two looks for nodes that are about to go: the shortest notice is of half a minute."""


async def start(spec: TaskSpec, client: EdlClient, check: Callable[[], None] | None = None) -> TaskOutcome | TaskSpec:
    """Adopt jobs of an earlier try, start what can be started, and observe once.

    Only for the first half of a try: it makes this try the owner. Returns the outcome if the work has ended, else the
    spec for `run`. Raises the errors of registry and backend; call `stop_all_tries` then.

    `check` raises for mistakes, before anything is started; it is not called for adopted trainers.
    """
    earlier = await _adopted_trainers(spec, client.backend)
    adopted = earlier is not None
    if not adopted:
        if check:
            await asyncio.to_thread(check)
        await client.progress(spec.name)  # fail if Redis is away now; `run` tolerates an outage
    has_succeeded = earlier is not None and earlier.phase == "succeeded"
    if spec.pool_job and not (has_succeeded and await job_status(client.backend, spec.pool_job.name) is None):
        await _submit(spec, spec.pool_job, client)
    if adopted:
        await _submit(spec, spec.trainer_job, client)
    view = await _observe(spec, client, started=adopted)
    decision = decide(spec, view, clock())
    if isinstance(decision, TaskOutcome):
        return await _with_progress(spec, decision, view, client)
    starts = decision == "start_trainer" and not spec.pool
    if starts:
        await _submit(spec, spec.trainer_job, client)
    return msgspec.structs.replace(spec, started=adopted or starts)


async def run(
    spec: TaskSpec, client: EdlClient, log: LogFunction, show: Callable[[Progress], None] | None = None
) -> TaskOutcome:
    """Follow the work until it ends, writing progress and the job's output to `log`; `show` gets each progress, too.

    Trainers are started once in a try, also if the triggerer restarts, so that those that a person stops stay stopped.
    Tolerates a Redis outage, as the backend reports the end of the training. Raises BackendError.
    """
    async with ProgressLogger(spec, client, log, show) as progress_logger:
        started = recorded = spec.started
        stop_logged = False
        asked_at: float | None = None
        evacuated_at = -math.inf
        while True:
            view = msgspec.structs.replace(await _observe(spec, client, started=started), asked_at=asked_at)
            started = view.started
            recorded = recorded or (started and await _record_started(spec, client))
            decision = decide(spec, view, clock())
            if isinstance(decision, TaskOutcome):
                if decision.ended == "stopped":
                    await stop(
                        spec, client.backend
                    )  # before the result is read: leaving instances write a last checkpoint
                await progress_logger.finish(view, is_over=decision.ended != "timed_out")
                return await _with_progress(spec, decision, view, client)
            if decision == "start_trainer":
                await _submit(spec, spec.trainer_job, client)
                log(f"Started {spec.name!r}")
                started = True
                continue
            if decision == "stop_trainer":
                asked_at = asked_at or clock()
                if await _request_stop(spec, client) and not stop_logged:
                    log(f"The time to train is over: {spec.name!r} was asked to end with a checkpoint")
                    stop_logged = True
            if clock() >= evacuated_at + EVACUATE_EVERY_S:
                evacuated_at = clock()
                for line in await client.backend.evacuate(spec.jobs):
                    log(line)
            await progress_logger.update(view)
            await asyncio.sleep(POLL_INTERVAL_S)


async def stop(spec: TaskSpec, backend: Backend, jobs: Iterable[str] | None = None) -> None:
    """Stop everything with this try's token, or these `jobs` of it, at the same time. Keeps their logs."""
    names = spec.jobs if jobs is None else jobs
    await all_ended(*(backend.delete(name, token=spec.token) for name in names))


async def stop_all_tries(owner: str, backend: Backend) -> None:
    """Stop everything of a task instance, of any try: for a try that fails before it has adopted it."""
    left = [job for job in await backend.list() if token_owner(job.token) == owner]
    await all_ended(*(backend.delete(job.name, token=job.token) for job in left))


async def _submit(spec: TaskSpec, job: JobSpec | None, client: EdlClient) -> None:
    if job:
        await client.backend.submit(job, token=spec.token, secrets=client.secrets, origin=spec.origin)


async def _adopted_trainers(spec: TaskSpec, backend: Backend) -> JobStatus | None:
    """Return an earlier try's training that this one adopts; stop one that has failed or whose spec differs.

    One that has succeeded is adopted for its result, but not where the task was cleared since: then it trains again.
    """
    earlier = await job_status(backend, spec.trainer_job.name) if spec.trainer_job else None
    if not earlier or not spec.trainer_job:
        return None
    is_wanted = is_retry(spec.token, earlier.token) if earlier.phase == "succeeded" else earlier.phase != "failed"
    if earlier.digest == spec.trainer_job.digest and is_wanted:
        return earlier
    check_owner(earlier, spec.token)
    await backend.delete(earlier.name)
    return None


async def _observe(spec: TaskSpec, client: EdlClient, *, started: bool) -> TaskState:
    trainer = await job_status(client.backend, spec.trainer_job.name) if spec.trainer_job else None
    started = started or trainer is not None
    pool_job = spec.pool_job.name if spec.pool_job else "" if started else spec.pool
    pool = await job_status(client.backend, pool_job) if pool_job else None
    if started or not spec.pool:
        return TaskState(pool=pool, trainer=trainer, started=started)
    try:
        if await client.started_by(spec.name) == spec.token:
            return TaskState(pool=pool, started=True)
        teachers = await client.teachers(spec.pool)
        if spec.servers:
            teachers = [one for one in teachers if one in spec.servers]
        others = "" if pool or teachers else await client.other_pools(spec.pool)
        return TaskState(pool=pool, teachers=tuple(teachers), other_pools=others)
    except RegistryUnavailableError:
        return TaskState(pool=pool, teachers=None)


async def _record_started(spec: TaskSpec, client: EdlClient) -> bool:
    """Record that this try has started its trainers, for another triggerer; False while Redis is away."""
    try:
        await client.save_started_by(spec.name, spec.token)
    except RegistryUnavailableError:
        return False
    return True


async def _request_stop(spec: TaskSpec, client: EdlClient) -> bool:
    """Send the request to end; repeatedly, as new instances do not know what dead ones were asked."""
    try:
        return await client.request_stop(spec.name, "its time to train is over")
    except RegistryUnavailableError:
        return False


async def _with_progress(spec: TaskSpec, outcome: TaskOutcome, view: TaskState, client: EdlClient) -> TaskOutcome:
    """Add the training's progress from Redis, if that answers."""
    since = view.trainer.created_at if view.trainer else spec.began_at
    try:
        return msgspec.structs.replace(
            outcome,
            progress=await latest_progress(view.trainer, client) if view.trainer else None,
            training=await client.training(spec.name) if view.trainer else None,
            generations=await client.generations(spec.name) if view.trainer else 0,
            checkpoint=await client.checkpoint(spec.stream, spec.name, since) if spec.stream else None,
        )
    except RegistryUnavailableError:
        return outcome
