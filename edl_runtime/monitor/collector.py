"""One look at a backend and at Redis."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from edl_runtime.autoscale import history, present
from edl_runtime.autoscale.rescale import last_plan
from edl_runtime.backends.base import Capacity
from edl_runtime.errors import BackendError, RegistryUnavailableError
from edl_runtime.monitor.view import Monitor, view
from edl_runtime.pool_reports import PoolDemand
from edl_runtime.registry.demands import demands
from edl_runtime.registry.directory import Directory

PLAN_HOLDS_S = 900.0
"""Who rescales does so more often than this."""

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.autoscale.plan import Plan
    from edl_runtime.backends.base import Backend

UNSEEN = "members of pools, targets and the past are unknown"


async def look(backend: Backend, client: Redis | None, namespace: str) -> Monitor:
    """Return what there is now, and remember it in Redis for `edl monitor --history`.

    What can't be asked, as while Redis is away, is left out, and that is said. Raises BackendError if the backend can't
    tell its jobs.
    """
    jobs, (capacity, lacks) = await asyncio.gather(backend.list(), _capacity(backend))
    now = time.time()
    plan: Plan | None = None
    pools: dict[str, PoolDemand] = {}
    if client is None:
        lacks.append(f"EDL_REDIS_URL names no Redis: {UNSEEN}")
    else:
        try:
            plan = await last_plan(client, namespace)
            if plan and now - plan.at > PLAN_HOLDS_S:
                lacks.append(f"the last rescaling was {(now - plan.at) / 60:.0f} min ago; its targets are not shown")
                plan = None
            pools = await _pools(client, namespace)
            await history.record(client, namespace, present.point(jobs, capacity, plan))
        except RegistryUnavailableError as error:
            lacks.append(f"{UNSEEN}: {error}")
    return view(jobs, capacity, plan, pools, now, lacks=lacks)


async def _capacity(backend: Backend) -> tuple[Capacity, list[str]]:
    """Return what nodes there are, none if that can't be known, and why it can't."""
    try:
        return await backend.capacity(), []
    except BackendError as error:
        return Capacity(nodes=()), [f"what nodes have is unknown: {error}"]


async def _pools(client: Redis, namespace: str) -> dict[str, PoolDemand]:
    """Return what the members of each pool report, of those pools that have members."""
    names = await Directory(client, namespace).pools()
    return {name: told for name, told in (await demands(client, namespace, names)).items() if told != PoolDemand()}
