"""One pass over all jobs and pools: look, decide, resize. Whoever makes it, it is made alone.

A pass that is ended half-way leaves what the next one finds and completes, for it is decided by what there is and
sizes are numbers, not differences. Nothing is changed unless all that it is decided by could be asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.autoscale import history
from edl_runtime.autoscale.plan import JobTarget, Plan, Rules, plan
from edl_runtime.autoscale.policies import Policy
from edl_runtime.autoscale.policy import decide
from edl_runtime.autoscale.present import point
from edl_runtime.autoscale.survey import Survey, survey
from edl_runtime.errors import (
    BackendError,
    ClusterUnavailableError,
    EdlError,
    JobEndedError,
    RegistryUnavailableError,
    RescalingError,
    SpecError,
    UnknownJobError,
)
from edl_runtime.log import get_logger
from edl_runtime.store import keys
from edl_runtime.store.client import unavailable_if_lost
from edl_runtime.store.records import decoded

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.backends.base import Backend

PASS_S = 60.0
"""A pass that takes longer is given up: what it was decided by is not so any more."""

LET_GO_S = 5.0
"""So much later another may begin, should the first be unable to say that it is over."""

WAITS_S = 90.0
"""So long a pass waits for the one before it."""

KEPT_S = 24 * 3600
"""How long the last plan is kept."""

AT_ONCE = 8
"""So many jobs are resized at a time."""

GONE = (UnknownJobError, JobEndedError, SpecError)
"""What a resize meets of a job that has ended meanwhile, its name perhaps another's by now: it keeps nothing."""


class Rescaled(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass has done: its `plan`, and of the jobs that could not be resized, by name, why."""

    plan: Plan
    refused: dict[str, str] = {}


async def rescale(
    backend: Backend, client: Redis, namespace: str, rules: Rules, *, dry_run: bool = False, policy: Policy = decide
) -> Rescaled:
    """Make one pass; with `dry_run` decide alone.

    Jobs that can't be resized, as they have ended meanwhile, are told in `refused`. Raises RegistryUnavailableError,
    BackendError when what decides can't be asked or none of the jobs can be resized, RescalingError if this pass or the
    one before it takes too long.
    """
    async with _alone(client, namespace):
        try:
            async with asyncio.timeout(PASS_S):
                surveyed = await survey(backend, client, namespace, rules.windows)
                if dry_run:
                    return Rescaled(plan=plan(surveyed, rules, policy))
                done = await _carry_out(surveyed, rules, policy, backend)
                await keep(client, namespace, done.plan)
                await history.record(client, namespace, point(surveyed.jobs, surveyed.capacity, done.plan))
                return done
        except TimeoutError:
            raise RescalingError("this rescaling", PASS_S) from None


async def keep(client: Redis, namespace: str, found: Plan) -> None:
    """Let others see the plan. Raises RegistryUnavailableError."""
    with unavailable_if_lost(client):
        await client.set(keys.plan(namespace), msgspec.json.encode(found), ex=KEPT_S)


async def last_plan(client: Redis, namespace: str) -> Plan | None:
    """Return the last plan, None when there was none within a day; None, too, for what can't be read.

    Raises RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        kept = await client.get(keys.plan(namespace))
    return decoded(kept, Plan)


async def _carry_out(surveyed: Survey, rules: Rules, policy: Policy, backend: Backend) -> Rescaled:
    """Decide, and resize the jobs, those first that shrink. Raises what none of the jobs could be resized for.

    What a job keeps that should shrink, and can't, is not for others: these are decided about anew, beside it. Who has
    shrunk for what is not to be any more gets back what it had.
    """
    sizes = {job.name: job.wanted for job in surveyed.jobs}
    refused: dict[str, EdlError] = {}
    resized: set[str] = set()

    async def resize(jobs: Sequence[JobTarget]) -> dict[str, EdlError]:
        met = await _resize(jobs, backend)
        done = {one.name: one.target for one in jobs if one.name not in met}
        sizes.update(done)
        resized.update(done)
        refused.update(met)
        return met

    while True:
        stuck = {name: str(error) for name, error in refused.items() if not isinstance(error, GONE)}
        found = plan(surveyed, rules, policy, stuck=stuck)
        met = await resize([one for one in found.targets if one.target < sizes[one.name]])
        if all(isinstance(error, GONE) for error in met.values()):
            break
    await resize([one for one in found.targets if one.target > sizes[one.name]])
    errors = [error for error in refused.values() if not isinstance(error, GONE)]
    if errors and len(errors) == len(resized | refused.keys()):
        raise errors[0]
    return Rescaled(plan=found, refused={name: str(error) for name, error in refused.items()})


async def _resize(jobs: Sequence[JobTarget], backend: Backend) -> dict[str, EdlError]:
    """Resize these jobs; return why some could not be. Raises ClusterUnavailableError, by which none can be."""
    places = asyncio.Semaphore(AT_ONCE)
    refused: dict[str, EdlError] = {}

    async def resize(one: JobTarget) -> None:
        async with places:
            try:
                await backend.resize(one.name, one.target)
            except ClusterUnavailableError:
                raise
            except (BackendError, SpecError) as error:
                refused[one.name] = error
                return
            get_logger("edl").info("job.rescaled", job=one.name, instances=one.target, reason=one.reason)

    try:
        async with asyncio.TaskGroup() as group:
            for one in jobs:
                group.create_task(resize(one))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the others were stopped by it, or have met the same
    return refused


@asynccontextmanager
async def _alone(client: Redis, namespace: str) -> AsyncIterator[None]:
    """Hold the lock of passes in this namespace; one that is lost meanwhile is left."""
    from redis.exceptions import LockError

    lock = client.lock(keys.rescaling(namespace), timeout=PASS_S + LET_GO_S, blocking_timeout=WAITS_S)
    with unavailable_if_lost(client):
        if not await lock.acquire(blocking=False):
            get_logger("edl").info("rescaling.waits", behind="another", at_most_s=WAITS_S)
            if not await lock.acquire():
                raise RescalingError("another rescaling", WAITS_S)
    try:
        yield
    finally:
        try:
            with unavailable_if_lost(client):
                await lock.release()
        except (LockError, RegistryUnavailableError) as error:  # it is let go of by itself
            get_logger("edl").warning("rescaling.lock_lost", cause=str(error))
