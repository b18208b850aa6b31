"""Snapshot for `edl monitor`: jobs, pools, targets and resources.

The first columns are those of the original EDL's tutorial.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.autoscale import history
from edl_runtime.autoscale.history import JobState, ResourceUse
from edl_runtime.autoscale.planner import JobTarget, RescalingPlan
from edl_runtime.autoscale.rescale import last_plan
from edl_runtime.backends.interface import Capacity, JobStatus
from edl_runtime.errors import BackendError
from edl_runtime.pool_reports import PoolDemand
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.pools import read_demands
from edl_runtime.specs import JobKind
from edl_runtime.store.errors import RegistryUnavailableError

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.backends.interface import Backend

HEADINGS = ("SUBMITTED-JOBS", "PENDING-JOBS", "RUNNING-TRAINERS", "CPU-UTILS", "GPU-UTILS")
NOTHING = "-"

UNITS = {"cpu": "cores", "memory": "bytes", "ephemeral-storage": "bytes"}
"""Units of resources; others are counted in pieces."""


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """A job or pool that has not ended.

    - `running` of its `wanted` (requested) instances run.
    - `target`, `reason`: of the last plan; None if that does not name it.
    - `trouble`: the job's own error; empty for none.
    """

    name: str
    kind: JobKind
    state: JobState
    running: int
    wanted: int
    target: int | None = None
    reason: str = ""
    trouble: str = ""


class PoolLine(msgspec.Struct, frozen=True, kw_only=True):
    """A pool: `running` of `wanted` instances, None if the backend does not know it, as with teachers started by hand.

    - `teachers`, `students`: how many are registered; None without Redis.
    - `busy`, `waiting`: the mean share of their time that teachers work, and that students wait for them, 0 to 1; None
      without reports.
    """

    name: str
    running: int | None = None
    wanted: int | None = None
    teachers: int | None = None
    students: int | None = None
    busy: float | None = None
    waiting: float | None = None


class MonitorSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state at a time, `at`, in Unix seconds.

    - `submitted`: the trainings that have not ended, by name; `pending`: those with fewer running instances than their
      minimum; `suspended`: those of the pending that were suspended.
    - `trainers`: running trainers by training.
    - `use`: of each resource, by name; empty while the nodes are unknown.
    - `jobs`: the trainings and pools that have not ended; `pools`: these pools, and those started by hand.
    - `planned_at`: when the last plan was made, None when nothing rescales; `window`: its traffic window, empty without
      windows; `until`: its end; `why`: what limits training; `notes`: warnings about the windows.
    - `lacks`: what is missing here, and why.
    """

    at: float
    submitted: tuple[str, ...]
    pending: tuple[str, ...]
    suspended: tuple[str, ...]
    trainers: dict[str, int]
    use: dict[str, ResourceUse]
    jobs: tuple[JobLine, ...]
    pools: tuple[PoolLine, ...] = ()
    planned_at: float | None = None
    window: str = ""
    until: float | None = None
    why: str = ""
    notes: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


def build_snapshot(
    jobs: Iterable[JobStatus],
    capacity: Capacity,
    plan: RescalingPlan | None,
    pools: Mapping[str, PoolDemand],
    at: float,
    *,
    lacks: Sequence[str] = (),
) -> MonitorSnapshot:
    """Return the snapshot of these parts."""
    active = sorted((job for job in jobs if not job.has_ended), key=lambda job: job.name)
    trainings = [job for job in active if job.kind == "trainer"]
    own = {job.name: job for job in active if job.kind == "pool"}
    states = {job.name: history.job_state(job) for job in trainings}
    targets = {target.name: target for target in plan.targets} if plan else {}
    return MonitorSnapshot(
        at=at,
        submitted=tuple(states),
        pending=tuple(name for name, state in states.items() if state != "running"),
        suspended=tuple(name for name, state in states.items() if state == "suspended"),
        trainers={job.name: history.running_count(job) for job in trainings},
        use=history.resource_use(active, capacity, plan),
        jobs=tuple(_job_line(job, targets.get(job.name)) for job in active),
        pools=tuple(_pool_line(name, own.get(name), pools.get(name)) for name in sorted({*own, *pools})),
        planned_at=plan.at if plan else None,
        window=plan.window if plan else "",
        until=plan.until if plan else None,
        why=plan.why if plan else "",
        notes=plan.notes if plan else (),
        lacks=tuple(lacks),
    )


def summary_row(monitor: MonitorSnapshot) -> tuple[str, ...]:
    """Return the row below `HEADINGS`, with trainers as in "example:10|example1:8", "-" for none."""
    trainers = (
        f"{name}:{'suspended' if name in monitor.suspended else count}" for name, count in monitor.trainers.items()
    )
    return (
        str(len(monitor.submitted)),
        str(len(monitor.pending)),
        "|".join(trainers) or NOTHING,
        *(utilisation(monitor.use.get(resource)) for resource in ("cpu", "gpu")),
    )


def utilisation(use: ResourceUse | None) -> str:
    """Return the reserved share, as in "54.40%"."""
    return NOTHING if use is None or use.share is None else f"{100 * use.share:.2f}%"


def _job_line(job: JobStatus, target: JobTarget | None) -> JobLine:
    return JobLine(
        name=job.name,
        kind=job.kind,
        state=history.job_state(job),
        running=history.running_count(job),
        wanted=job.wanted,
        target=target.target if target else None,
        reason=target.reason if target else "",
        trouble=job.reason,
    )


def _pool_line(name: str, job: JobStatus | None, demand: PoolDemand | None) -> PoolLine:
    return PoolLine(
        name=name,
        running=history.running_count(job) if job else None,
        wanted=job.wanted if job else None,
        teachers=len(demand.teachers) if demand else None,
        students=len(demand.students) if demand else None,
        busy=demand.busy if demand else None,
        waiting=demand.waiting if demand else None,
    )


# Taking a snapshot of a backend and Redis.

PLAN_HOLDS_S = 900.0
"""Targets of an older plan are not shown: whatever rescales does so more often."""

UNKNOWN = "members of pools, targets and the past are unknown"


async def take_snapshot(backend: Backend, client: Redis | None, namespace: str) -> MonitorSnapshot:
    """Return the current snapshot, and record a point in Redis for `edl monitor --history`.

    What can't be read, as while Redis is down, is listed in `lacks`. Raises BackendError if the jobs can't be read.
    """
    jobs, (capacity, lacks) = await asyncio.gather(backend.list(), _capacity(backend))
    now = time.time()
    plan: RescalingPlan | None = None
    pools: dict[str, PoolDemand] = {}
    if client is None:
        lacks.append(f"EDL_REDIS_URL names no Redis: {UNKNOWN}")
    else:
        try:
            plan = await last_plan(client, namespace)
            if plan and now - plan.at > PLAN_HOLDS_S:
                lacks.append(f"the last rescaling was {(now - plan.at) / 60:.0f} min ago; its targets are not shown")
                plan = None
            pools = await _pools(client, namespace)
            await history.record_point(client, namespace, history.history_point(jobs, capacity, plan))
        except RegistryUnavailableError as error:
            lacks.append(f"{UNKNOWN}: {error}")
    return build_snapshot(jobs, capacity, plan, pools, now, lacks=lacks)


async def _capacity(backend: Backend) -> tuple[Capacity, list[str]]:
    """Return the nodes; or none and the error."""
    try:
        return await backend.capacity(), []
    except BackendError as error:
        return Capacity(nodes=()), [f"what nodes have is unknown: {error}"]


async def _pools(client: Redis, namespace: str) -> dict[str, PoolDemand]:
    """Return the reports of each pool that has members."""
    names = await Directory(client, namespace).pools()
    demands = await read_demands(client, namespace, names)
    return {name: demand for name, demand in demands.items() if demand != PoolDemand()}
