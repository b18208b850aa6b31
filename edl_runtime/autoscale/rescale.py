"""One rescaling pass over all jobs and pools: empty nodes that go, take a snapshot, decide, resize.

A lock in Redis allows one at a time in a place.

An interrupted pass is completed by the next one, because sizes are absolute numbers. Nothing is resized unless the
whole snapshot could be taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.autoscale import history
from edl_runtime.autoscale.cluster.resizes import save_resizes
from edl_runtime.autoscale.cluster.snapshot import ClusterSnapshot, take_snapshot
from edl_runtime.autoscale.errors import RescalingError
from edl_runtime.autoscale.history import RescaleOutcome, history_point, rescale_outcome, rules_note
from edl_runtime.autoscale.planner import JobTarget, RescalingPlan, RescalingRules, make_plan
from edl_runtime.autoscale.policy.decide import decide
from edl_runtime.autoscale.policy.interface import Policy
from edl_runtime.backends.errors import ClusterUnavailableError, JobEndedError, UnknownJobError
from edl_runtime.concurrency import all_completed
from edl_runtime.errors import EdlError, SpecError, isolated
from edl_runtime.log import get_logger
from edl_runtime.store import keys
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.backends.interface import Backend, JobStatus

PASS_LIMIT_S = 60.0
"""A pass that takes longer is cancelled: its snapshot is out of date."""

LOCK_MARGIN_S = 5.0
"""How long after that the lock expires, if the pass could not release it."""

LOCK_WAIT_S = 90.0
"""How long a pass waits for the one before it."""

MAX_PARALLEL_RESIZES = 16
"""How many jobs are resized at a time."""

ENDED_ERRORS = (UnknownJobError, JobEndedError, SpecError)
"""Raised by a resize of a job that has ended meanwhile, or whose name is another's by now. It uses no capacity."""


async def rescale(
    backend: Backend,
    client: Redis,
    namespace: str,
    rules: RescalingRules,
    *,
    dry_run: bool = False,
    policy: Policy = decide,
) -> RescaleOutcome:
    """Make one pass; with `dry_run` only decide.

    `backend` runs the jobs that `client`, a connection to Redis, has in `namespace`. `policy` decides how many
    instances each job gets, within `rules`.

    Raises RegistryUnavailableError; BackendError when the snapshot can't be taken or none of the jobs can be resized;
    RescalingError if this pass or the one before it takes too long.
    """
    async with _pass_lock(client, namespace, backend.place):
        try:
            async with asyncio.timeout(PASS_LIMIT_S):
                moved = [] if dry_run else await backend.evacuate()
                snapshot = await take_snapshot(backend, client, namespace, rules.windows)
                if dry_run:
                    plan, refused = _plan(snapshot, rules, policy, {})
                    return rescale_outcome(plan, refused, rules, policy)
                record = partial(save_resizes, client, namespace, backend.place)
                done = await _carry_out(snapshot, rules, policy, backend, record)
                warning = rules_note(await history.last_pass(client, namespace, backend.place), done)
                notes = (*done.plan.notes, *moved, *filter(None, [warning]))
                plan = msgspec.structs.replace(done.plan, notes=notes)
                done = msgspec.structs.replace(done, plan=plan)
                await history.save_pass(client, namespace, backend.place, done)
                await history.record_point(
                    client, namespace, backend.place, history_point(snapshot.jobs, snapshot.capacity, done.plan)
                )
                return done
        except TimeoutError:
            raise RescalingError("this rescaling", PASS_LIMIT_S) from None


async def _carry_out(
    snapshot: ClusterSnapshot,
    rules: RescalingRules,
    policy: Policy,
    backend: Backend,
    record: Callable[[Mapping[str, float]], Awaitable[None]],
) -> RescaleOutcome:
    """Decide and resize, shrinking jobs first. Raises the first error if no job could be resized.

    A job that should shrink and can't keeps its capacity, so the plan is made again beside it. A job that has shrunk
    for a plan that no longer holds gets back what it had.
    """
    sizes = {job.name: job.wanted for job in snapshot.jobs}
    refused: dict[str, EdlError] = {}
    resized: set[str] = set()

    async def resize(jobs: Sequence[JobTarget]) -> dict[str, EdlError]:
        met, times = await _resize(jobs, backend)
        if times:
            with suppress(RegistryUnavailableError):  # then they count as resized by hand, and rest
                await record(times)
        done = {one.name: one.target for one in jobs if one.name not in met}
        sizes.update(done)
        resized.update(done)
        refused.update(met)
        return met

    while True:
        stuck = {name: str(error) for name, error in refused.items() if not isinstance(error, ENDED_ERRORS)}
        found, left_out = _plan(snapshot, rules, policy, stuck)
        met = await resize([one for one in found.targets if one.target < sizes[one.name]])
        if all(isinstance(error, ENDED_ERRORS) for error in met.values()):
            break
    await resize([one for one in found.targets if one.target > sizes[one.name]])
    errors = [error for error in refused.values() if not isinstance(error, ENDED_ERRORS)]
    if errors and len(errors) == len(resized | refused.keys()):
        raise errors[0]
    told = {name: _refusal(error) for name, error in refused.items()} | left_out
    return rescale_outcome(found, told, rules, policy)


def _plan(
    snapshot: ClusterSnapshot, rules: RescalingRules, policy: Policy, stuck: Mapping[str, str]
) -> tuple[RescalingPlan, dict[str, str]]:
    """Return the plan, and the jobs that are not in it, because there is none even for each of them alone, and why.

    Raises what the plan of all raises if that holds for all jobs: it is not theirs.
    """
    known = {**snapshot.stuck, **stuck}

    def plan_of(jobs: Sequence[JobStatus]) -> RescalingPlan:
        there = {job.name for job in jobs}
        kept = {name: why for name, why in known.items() if name in there}
        return make_plan(msgspec.structs.replace(snapshot, jobs=tuple(jobs)), rules, policy, stuck=kept)

    try:
        return plan_of(snapshot.jobs), {}
    except Exception:
        left_out: dict[str, str] = {}
        planned = [job for job in snapshot.jobs if job.scaling and not job.has_ended]
        for job in planned:
            try:
                with isolated(f"job {job.name!r}"):
                    plan_of([job])
            except EdlError as error:
                left_out[job.name] = str(error)
        if len(left_out) in (0, len(planned)):
            raise
    return plan_of([job for job in snapshot.jobs if job.name not in left_out]), left_out


def _refusal(error: EdlError) -> str:
    """Return an error about one job without the names of others."""
    return f"no job or pool named {error.name!r} any more" if isinstance(error, UnknownJobError) else str(error)


async def _resize(jobs: Sequence[JobTarget], backend: Backend) -> tuple[dict[str, EdlError], dict[str, float]]:
    """Resize these jobs; return the errors, and the times of the resizes, by name.

    Raises ClusterUnavailableError, which concerns all.
    """
    places = asyncio.Semaphore(MAX_PARALLEL_RESIZES)
    refused: dict[str, EdlError] = {}
    times: dict[str, float] = {}

    async def resize(one: JobTarget) -> None:
        async with places:
            try:
                with isolated(f"job {one.name!r}"):
                    resized = await backend.resize(one.name, one.target, reason=one.reason)
            except ClusterUnavailableError:
                raise
            except EdlError as error:
                refused[one.name] = error
                return
            if resized.scaling and resized.scaling.resized_at is not None:
                times[one.name] = resized.scaling.resized_at
            get_logger("edl").info("job.rescaled", job=one.name, instances=one.target, reason=one.reason)

    await all_completed(*map(resize, jobs))
    return refused, times


@asynccontextmanager
async def _pass_lock(client: Redis, namespace: str, place: str) -> AsyncIterator[None]:
    """Hold this place's lock of passes. Losing it meanwhile is only logged."""
    from redis.exceptions import LockError

    key, timeout_s = keys.rescaling(namespace, place), PASS_LIMIT_S + LOCK_MARGIN_S
    lock = client.lock(key, timeout=timeout_s, blocking_timeout=LOCK_WAIT_S)
    with unavailable_if_lost(client):
        if not await lock.acquire(blocking=False):
            get_logger("edl").info("rescaling.lock_held", wait_s=LOCK_WAIT_S)
            if not await lock.acquire():
                raise RescalingError("another rescaling", LOCK_WAIT_S)
    try:
        yield
    finally:
        try:
            with unavailable_if_lost(client):
                await lock.release()
        except (LockError, RegistryUnavailableError) as error:  # it expires by itself
            get_logger("edl").warning("rescaling.lock_lost", cause=str(error))
