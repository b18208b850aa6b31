"""Runs a task's work: waits for the pool, starts the training, follows it. Workers and triggerers run the same code.

`start` and `run` observe, ask `decide` and act. All of it can be done again from the start (by another triggerer,
by the next try) and finds what is there already.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from edl_airflow.client import EdlClient, job_status
from edl_airflow.runtime.decisions import TaskState, decide
from edl_airflow.runtime.log import LogFunction, ProgressLogger, latest_progress
from edl_airflow.runtime.spec import TaskOutcome, TaskSpec
from edl_runtime.backends.interface import Backend, check_owner, token_owner
from edl_runtime.store.errors import RegistryUnavailableError

clock = time.time
"""Unix seconds: when the time to train, and the task's own, is over."""

POLL_INTERVAL_S = 0.5
"""Seconds between two looks at what the work waits for."""


async def start(spec: TaskSpec, client: EdlClient, check: Callable[[], None] | None = None) -> TaskOutcome | TaskSpec:
    """Start what can be started at once, taking over what an earlier try left, and look once.

    Only for the first half of a try: it makes this try's token the owner. Returns the outcome if the work has
    ended already, else the work to go on with. Raises what the registry and the backend raise; `stop_all_tries` then
    leaves nothing.

    `check` raises for what is seen to be wrong before anything is started; what runs already is not checked.
    """
    adopted = await _adopts_trainers(spec, client.backend)
    if not adopted:
        if check:
            await asyncio.to_thread(check)
        await client.progress(spec.name)  # a Redis that is away is an error now, and an outage to ride out later
    if spec.pool_job:
        await client.backend.submit(spec.pool_job, token=spec.token, secrets=client.secrets)
    if adopted:
        await _submit_trainer(spec, client)
    view = await _observe(spec, client, started=adopted)
    decision = decide(spec, view, clock())
    if isinstance(decision, TaskOutcome):
        return await _with_progress(spec, decision, view, client)
    starts = decision == "start_trainer" and not spec.pool
    if starts:
        await _submit_trainer(spec, client)
    return msgspec.structs.replace(spec, started=adopted or starts)


async def run(spec: TaskSpec, client: EdlClient, log: LogFunction) -> TaskOutcome:
    """Go on until the work has ended, logging progress and what the job writes with `say`.

    Trainers are started once in a try, also if the triggerer restarts: those that a person stops stay stopped. Rides
    out a Redis that is away: the training goes on, and the backend tells when it ends. Raises BackendError.
    """
    async with ProgressLogger(spec, client, log) as progress_logger:
        started = noted = spec.started
        told = False
        asked_at: float | None = None
        while True:
            view = msgspec.structs.replace(await _observe(spec, client, started=started), asked_at=asked_at)
            started = view.started
            noted = noted or (started and await _record_started(spec, client))
            decision = decide(spec, view, clock())
            if isinstance(decision, TaskOutcome):
                if decision.ended == "stopped":
                    await stop(spec, client.backend)  # instances that leave write a checkpoint, which is the job's last
                await progress_logger.finish(view, is_over=decision.ended != "timed_out")
                return await _with_progress(spec, decision, view, client)
            if decision == "start_trainer":
                await _submit_trainer(spec, client)
                log(f"Started {spec.name!r}")
                started = True
                continue
            if decision == "stop_trainer":
                asked_at = asked_at or clock()
                if await _request_stop(spec, client) and not told:
                    log(f"The time to train is over: {spec.name!r} was asked to end with a checkpoint")
                    told = True
            await progress_logger.update(view)
            await asyncio.sleep(POLL_INTERVAL_S)


async def stop(spec: TaskSpec, backend: Backend) -> None:
    """End everything that carries this try's token, trainers and pool at the same time; their logs are kept."""
    await asyncio.gather(*(backend.delete(name, token=spec.token) for name in spec.jobs))


async def stop_all_tries(owner: str, backend: Backend) -> None:
    """End everything of a task instance, whichever try it is from: for a try that fails before it can take it over."""
    left = [job for job in await backend.list() if token_owner(job.token) == owner]
    await asyncio.gather(*(backend.delete(job.name, token=job.token) for job in left))


async def _submit_trainer(spec: TaskSpec, client: EdlClient) -> None:
    if spec.trainer_job:
        await client.backend.submit(spec.trainer_job, token=spec.token, secrets=client.secrets)


async def _adopts_trainers(spec: TaskSpec, backend: Backend) -> bool:
    """Return whether an earlier try's training is as good as a new one; stop it if it is not."""
    earlier = await job_status(backend, spec.trainer_job.name) if spec.trainer_job else None
    if not earlier or not spec.trainer_job:
        return False
    if earlier.digest == spec.trainer_job.digest and earlier.phase != "failed":
        return True
    check_owner(earlier, spec.token)
    await backend.delete(earlier.name)
    return False


async def _observe(spec: TaskSpec, client: EdlClient, *, started: bool) -> TaskState:
    trainer = await job_status(client.backend, spec.trainer_job.name) if spec.trainer_job else None
    started = started or trainer is not None
    pool = await job_status(client.backend, spec.pool) if spec.pool_job or (spec.pool and not started) else None
    if started or not spec.pool:
        return TaskState(pool=pool, trainer=trainer, started=started)
    try:
        if await client.started_by(spec.name) == spec.token:
            return TaskState(pool=pool, started=True)
        return TaskState(pool=pool, teachers=tuple(await client.teachers(spec.pool)))
    except RegistryUnavailableError:
        return TaskState(pool=pool, teachers=None)


async def _record_started(spec: TaskSpec, client: EdlClient) -> bool:
    """Keep that this try has started its trainers, for a triggerer that goes on; False while Redis is away."""
    try:
        await client.save_started_by(spec.name, spec.token)
    except RegistryUnavailableError:
        return False
    return True


async def _request_stop(spec: TaskSpec, client: EdlClient) -> bool:
    """Ask at each look: it may be heard by instances that are dead, and those that take their place know nothing."""
    try:
        return await client.request_stop(spec.name, "its time to train is over")
    except RegistryUnavailableError:
        return False


async def _with_progress(spec: TaskSpec, outcome: TaskOutcome, view: TaskState, client: EdlClient) -> TaskOutcome:
    """Add what Redis knows of how far the training came, if it answers."""
    since = view.trainer.created_at if view.trainer else spec.began_at
    try:
        return msgspec.structs.replace(
            outcome,
            progress=await latest_progress(view.trainer, client) if view.trainer else None,
            training=await client.training(spec.name) if view.trainer else None,
            generations=await client.generations(spec.name) if view.trainer else 0,
            landed=await client.checkpoint(spec.stream, spec.name, since) if spec.stream else None,
        )
    except RegistryUnavailableError:
        return outcome
