"""Snapshot for a rescaling pass: jobs, pools, nodes, measured speed-ups and what students need."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.autoscale.cluster.resizes import resized_by_hand
from edl_runtime.autoscale.cluster.throughput import speedups
from edl_runtime.autoscale.policy.model import Limit, Speedup
from edl_runtime.autoscale.policy.pool_size import pool_size
from edl_runtime.autoscale.traffic.forecast import Forecast
from edl_runtime.autoscale.traffic.windows import DeclaredWindows
from edl_runtime.backends.interface import Capacity, JobStatus
from edl_runtime.errors import EdlError, isolated
from edl_runtime.pool_reports import PoolDemand
from edl_runtime.registry.members import job_of_student
from edl_runtime.registry.pools import read_each_demand
from edl_runtime.store.redis_client import readable

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.backends.interface import Backend


MAX_READS = 3
"""How often jobs and nodes are read until both are of one time."""


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass decides by.

    - `at`: when it was made, in Unix seconds.
    - `jobs`: all jobs and pools, those that have ended too.
    - `capacity`: the nodes, and what is free there.
    - `forecast`: of what the web needs; None without a traffic source.
    - `needs`: how many teachers a pool's students need, by the pool's name.
    - `students`: the jobs of a pool's students, one for each student that uses it now, by the pool's name; an empty
      one for clients that have not joined it, where its teachers are busy without students.
    - `speedups`: how a job's speed depends on its instances, by its name, where that was measured.
    - `by_hand`: the names of the jobs that were last resized by somebody, and not by a pass.
    - `stuck`: the pools of which it is not known what their students need, by name, and why. They keep what they have.
    """

    at: float
    jobs: tuple[JobStatus, ...]
    capacity: Capacity
    forecast: Forecast | None = None
    needs: Mapping[str, Limit] = {}
    students: Mapping[str, tuple[str, ...]] = {}
    speedups: Mapping[str, Speedup] = {}
    by_hand: frozenset[str] = frozenset()
    stuck: Mapping[str, str] = {}


async def take_snapshot(
    backend: Backend, client: Redis, namespace: str, windows: DeclaredWindows | None = None
) -> ClusterSnapshot:
    """Take a snapshot, with a forecast where the windows name a traffic source.

    Raises BackendError, RegistryUnavailableError.
    """
    now_s = time.time()
    forecast = None
    if windows and windows.traffic:
        from edl_runtime.autoscale.traffic.sources.learner import fetch_forecast

        forecast = await fetch_forecast(windows.traffic, client, namespace, now_s, time_zone=windows.time_zone)
    jobs, capacity = await _jobs_and_capacity(backend)
    pools = {job.name: job for job in jobs if job.kind == "pool" and not job.has_ended}
    demands = await read_each_demand(client, namespace, list({job.pool for job in pools.values()}))
    asked = {job.pool for job in jobs if job.kind == "trainer"}
    needs: dict[str, Limit] = {}
    students: dict[str, tuple[str, ...]] = {}
    stuck: dict[str, str] = {}
    for name, job in pools.items():
        try:
            with isolated(f"what is reported in pool {name!r}"):
                demand = readable(demands[job.pool])
                students[name] = tuple(map(job_of_student, demand.students)) or ("",) * bool(demand.busy)
                if job.scaling:
                    needs[name] = _need(job, demand, is_asked=job.pool in asked)
        except EdlError as error:
            if job.scaling:
                stuck[name] = str(error)
    return ClusterSnapshot(
        at=now_s,
        jobs=tuple(jobs),
        capacity=capacity,
        forecast=forecast,
        needs=needs,
        students=students,
        speedups=await speedups(client, namespace, jobs, now_s),
        by_hand=await resized_by_hand(client, namespace, backend.place, jobs),
        stuck=stuck,
    )


async def _jobs_and_capacity(backend: Backend) -> tuple[list[JobStatus], Capacity]:
    """Return both as of one time: no instance was placed or removed between the two reads.

    If that does not succeed within MAX_READS, return what was read last.
    """
    jobs = await backend.list()
    for _ in range(MAX_READS):
        capacity = await backend.capacity()
        before, jobs = jobs, await backend.list()
        if _placed(before) == _placed(jobs):
            break
    return jobs, capacity


def _placed(jobs: Sequence[JobStatus]) -> list[tuple[str, bool, list[tuple[int, str, bool]]]]:
    return [
        (job.name, job.scaling is None, [(one.index, one.node, one.leaving) for one in job.instances]) for job in jobs
    ]


def _need(pool: JobStatus, demand: PoolDemand, *, is_asked: bool) -> Limit:
    assert pool.scaling  # noqa: S101 - none has ended
    if is_asked and not demand.students:
        return Limit(instances=pool.scaling.bounds.min, reason="its students have not joined it yet")
    need = pool_size(pool.attainable, demand, pool.scaling.bounds)
    return Limit(instances=need.teachers, reason=need.reason)
