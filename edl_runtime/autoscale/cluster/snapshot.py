"""What there is now: the jobs and pools of a connection, the nodes, and what pools' students need."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.autoscale.cluster.throughput import speedups
from edl_runtime.autoscale.policy.model import Limit, Speedup
from edl_runtime.autoscale.policy.pool_size import pool_size
from edl_runtime.autoscale.traffic.forecast import Forecast
from edl_runtime.autoscale.traffic.windows import TrafficWindows
from edl_runtime.backends.interface import Capacity, JobStatus
from edl_runtime.pool_reports import PoolDemand
from edl_runtime.registry.pools import read_demands

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.backends.interface import Backend


MAX_READS = 3
"""So often jobs and nodes are looked at until both are as they are at one time."""


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass of the policy decides by.

    - `at`: when it was made, in Unix seconds.
    - `jobs`: all jobs and pools, those that have ended too.
    - `capacity`: the nodes, and what is free there.
    - `forecast`: what is known of the web's need; None where no source tells it.
    - `needs`: how many teachers a pool's students need, by the pool's name, for those that can tell.
    - `students`: how many students use a pool now, by the pool's name.
    - `speedups`: how much faster a job trains with more instances, by its name, where that was measured.
    """

    at: float
    jobs: tuple[JobStatus, ...]
    capacity: Capacity
    forecast: Forecast | None = None
    needs: Mapping[str, Limit] = {}
    students: Mapping[str, int] = {}
    speedups: Mapping[str, Speedup] = {}


async def take_snapshot(
    backend: Backend, client: Redis, namespace: str, windows: TrafficWindows | None = None
) -> ClusterSnapshot:
    """Look at what there is, and at what is known of the web where windows name a source.

    Raises BackendError, RegistryUnavailableError.
    """
    now_s = time.time()
    forecast = await _forecast(windows, client, namespace, now_s)
    jobs, capacity = await _jobs_and_capacity(backend)
    pools = {job.name: job for job in jobs if job.kind == "pool" and not job.has_ended}
    said = await read_demands(client, namespace, list(pools))
    needs = {name: _need(job, said[name]) for name, job in pools.items() if job.scaling}
    measured = await speedups(client, namespace, jobs, now_s)
    return ClusterSnapshot(
        at=now_s,
        jobs=tuple(jobs),
        capacity=capacity,
        forecast=forecast,
        needs=needs,
        students={name: len(demand.students) for name, demand in said.items()},
        speedups=measured,
    )


async def _jobs_and_capacity(backend: Backend) -> tuple[list[JobStatus], Capacity]:
    """Return both as they are at one time: no instance has found its place, or left it, between the two looks.

    Where they do so again and again, the last of some looks counts.
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


def _need(pool: JobStatus, said: PoolDemand) -> Limit:
    assert pool.scaling  # noqa: S101 - none has ended
    need = pool_size(pool.attainable, said, pool.scaling.bounds)
    return Limit(instances=need.teachers, reason=need.reason)


async def _forecast(windows: TrafficWindows | None, client: Redis, namespace: str, now_s: float) -> Forecast | None:
    if windows is None or windows.traffic is None:
        return None
    from edl_runtime.autoscale.traffic.sources.learner import fetch_forecast

    return await fetch_forecast(windows.traffic, client, namespace, now_s, time_zone=windows.time_zone)
