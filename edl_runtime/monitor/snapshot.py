"""What `edl monitor` shows: one snapshot of jobs, pools, targets and resources.

The first columns are those of the original's tutorial: submitted jobs, pending jobs, running trainers, share of CPUs.
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

    from edl_runtime.autoscale.planner import RescalingPlan
    from edl_runtime.backends.interface import Backend

HEADINGS = ("SUBMITTED-JOBS", "PENDING-JOBS", "RUNNING-TRAINERS", "CPU-UTILS", "GPU-UTILS")
NOTHING = "-"

UNITS = {"cpu": "cores", "memory": "bytes", "ephemeral-storage": "bytes"}
"""Of what a resource is a number; of others, pieces."""


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """A job or pool that has not ended.

    - `running` of its `wanted` instances run.
    - `target`: how many the last plan wants it to have, and `reason` why; None if that plan does not know it.
    - `trouble`: what is wrong with it; empty for nothing.
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
    """A pool: `running` of `wanted` instances, None for one that no backend knows, as of teachers started by hand.

    - `teachers`, `students`: how many are registered; None where Redis does not tell.
    - `busy`: the share of their time that its teachers work, in the mean; `waiting`: the share of theirs that its
      students wait for them; 0 to 1, and None where nobody reports it.
    """

    name: str
    running: int | None = None
    wanted: int | None = None
    teachers: int | None = None
    students: int | None = None
    busy: float | None = None
    waiting: float | None = None


class MonitorSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What there is at a time, in Unix seconds.

    - `submitted`: the trainings that have not ended, by name; `pending`: those of which fewer run than they need;
      `suspended`: those of the pending that are to wait.
    - `trainers`: how many trainers of each run.
    - `use`: of each resource, by name; None while nobody can tell.
    - `jobs`: the trainings and pools that have not ended, by name; `pools`: the same pools, and those of others.
    - `planned_at`: when the last plan was made, None when nobody rescales; `window`: the traffic window that held then,
      empty without windows; `until`: its end, both in Unix seconds; `why`: what decides how much training may use.
    - `notes`: what is odd about the windows.
    - `lacks`: what is not shown, and why.
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
    """Put together what is shown."""
    going = sorted((job for job in jobs if not job.has_ended), key=lambda job: job.name)
    trainings = [job for job in going if job.kind == "trainer"]
    states = {job.name: history.job_state(job) for job in trainings}
    targets = {target.name: target for target in plan.targets} if plan else {}
    return MonitorSnapshot(
        at=at,
        submitted=tuple(states),
        pending=tuple(name for name, state in states.items() if state != "running"),
        suspended=tuple(name for name, state in states.items() if state == "suspended"),
        trainers={job.name: history.running_count(job) for job in trainings},
        use=history.resource_use(going, capacity, plan),
        jobs=tuple(_job_line(job, targets.get(job.name)) for job in going),
        pools=_pool_lines([job for job in going if job.kind == "pool"], pools),
        planned_at=plan.at if plan else None,
        window=plan.window if plan else "",
        until=plan.until if plan else None,
        why=plan.why if plan else "",
        notes=plan.notes if plan else (),
        lacks=tuple(lacks),
    )


def summary_row(monitor: MonitorSnapshot) -> tuple[str, ...]:
    """Return what stands below `HEADINGS`: trainers as in "example:10|example1:8", "-" for none."""
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
    """Return what is reserved of all, as in "54.40%"."""
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


def _pool_lines(jobs: Sequence[JobStatus], pools: Mapping[str, PoolDemand]) -> tuple[PoolLine, ...]:
    known = {job.name: job for job in jobs}
    return tuple(_pool_line(name, known.get(name), pools.get(name)) for name in sorted({*known, *pools}))


def _pool_line(name: str, job: JobStatus | None, told: PoolDemand | None) -> PoolLine:
    return PoolLine(
        name=name,
        running=history.running_count(job) if job else None,
        wanted=job.wanted if job else None,
        teachers=len(told.teachers) if told else None,
        students=len(told.students) if told else None,
        busy=told.busy if told else None,
        waiting=told.waiting if told else None,
    )


# One look at a backend and at Redis.

PLAN_HOLDS_S = 900.0
"""Who rescales does so more often than this."""

UNSEEN = "members of pools, targets and the past are unknown"


async def take_snapshot(backend: Backend, client: Redis | None, namespace: str) -> MonitorSnapshot:
    """Return what there is now, and remember it in Redis for `edl monitor --history`.

    What can't be asked, as while Redis is away, is left out, and that is said. Raises BackendError if the backend can't
    tell its jobs.
    """
    jobs, (capacity, lacks) = await asyncio.gather(backend.list(), _capacity(backend))
    now = time.time()
    plan: RescalingPlan | None = None
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
            await history.record_point(client, namespace, history.history_point(jobs, capacity, plan))
        except RegistryUnavailableError as error:
            lacks.append(f"{UNSEEN}: {error}")
    return build_snapshot(jobs, capacity, plan, pools, now, lacks=lacks)


async def _capacity(backend: Backend) -> tuple[Capacity, list[str]]:
    """Return what nodes there are, none if that can't be known, and why it can't."""
    try:
        return await backend.capacity(), []
    except BackendError as error:
        return Capacity(nodes=()), [f"what nodes have is unknown: {error}"]


async def _pools(client: Redis, namespace: str) -> dict[str, PoolDemand]:
    """Return what the members of each pool report, of those pools that have members."""
    names = await Directory(client, namespace).pools()
    return {name: told for name, told in (await read_demands(client, namespace, names)).items() if told != PoolDemand()}
