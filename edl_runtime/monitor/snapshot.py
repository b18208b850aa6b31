"""The state of all jobs and pools, as `edl monitor`, `edl jobs` and Airflow show it.

The first columns of `edl monitor` are those of the original EDL's tutorial.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from edl_runtime.autoscale import history
from edl_runtime.autoscale.history import JobState, ResourceUse
from edl_runtime.autoscale.planner import JobTarget, RescalingPlan
from edl_runtime.autoscale.policy.pool_size import describe_limit
from edl_runtime.backends.interface import Capacity, JobStatus, Origin
from edl_runtime.concurrency import all_completed
from edl_runtime.elastic.rendezvous.group_status import LastCheckpoint, LastResize
from edl_runtime.errors import BackendError, UnexpectedError, isolated
from edl_runtime.monitor.reports import JobReport, group_trouble, read_reports, standstill, unknown_reports
from edl_runtime.orphans import Orphan
from edl_runtime.pool_reports import PoolDemand
from edl_runtime.progress import Progress
from edl_runtime.registry.members import job_of_student
from edl_runtime.registry.pools import PoolInfo, TeacherInfo, list_pools
from edl_runtime.specs import Bounds, JobKind
from edl_runtime.store.errors import RegistryError

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.backends.interface import Backend

HEADINGS = ("SUBMITTED-JOBS", "PENDING-JOBS", "RUNNING-TRAINERS", "CPU-UTILS", "GPU-UTILS")
NOTHING = "-"


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """A job or pool.

    - `running` of its `wanted` (requested) instances run; `bounds`: the sizes it can have, None once it has ended.
    - `target`, `reason`: of the last plan, or why it could not be carried out; None if that does not name it.
    - `trouble`: that its task has left it, or why it is in that state: its own error, what its trainers wait for, or
      why they end; empty for none.
    - `origin`: whose task has started it, None for nobody's; `orphan`: the note that this task has left it, or None.
    - `progress`: of this run of the job, None before the first report. `share`: of all steps, 0 to 1, None while their
      number is unknown; `progress.time_left_s` likewise.
    - `limit`: what limits its speed, in words; empty while unknown.
    - `generation`, `checkpoint`, `resize`: of elastic trainers, the current one, and the last ones of this run.
    - `stragglers`: of elastic trainers, how many times as long as its peers an instance computes, by its number.
    """

    name: str
    kind: JobKind
    state: JobState | Literal["succeeded", "failed"]
    running: int
    wanted: int
    bounds: Bounds | None = None
    target: int | None = None
    reason: str = ""
    trouble: str = ""
    progress: Progress | None = None
    share: float | None = None
    limit: str = ""
    generation: int = 0
    checkpoint: LastCheckpoint | None = None
    resize: LastResize | None = None
    stragglers: dict[int, float] = {}
    origin: Origin | None = None
    orphan: Orphan | None = None

    @property
    def last_step_at(self) -> float | None:
        """When elastic trainers made their last step, in Unix seconds of their clock; None if unknown."""
        return self.progress.updated_at if self.progress and self.progress.instances else None


class TeacherLine(msgspec.Struct, frozen=True, kw_only=True):
    """A registered teacher.

    - `busy`: the share of its time that it works, 0 to 1; None without a report, as of servers that are not ours.
    - `answered`: requests since its start; of a server that is not ours, those of the jobs' students; None if unknown.
    - `quarantine`: why students send it no requests, and how many; empty while all use it.
    """

    id: str
    address: str
    weight: float = 1.0
    busy: float | None = None
    answered: int | None = None
    quarantine: str = ""


class PoolLine(msgspec.Struct, frozen=True, kw_only=True):
    """A pool: `running` of `wanted` instances, None if the backend does not know it, as with teachers started by hand.

    - `teachers`, `students`: how many are registered; None without Redis.
    - `busy`, `waiting`: the mean share of their time that teachers work, and that students wait for them, 0 to 1; None
      without reports.
    - `limit`: in words, whether students wait for teachers and how many more would end it; empty without Redis.
    - `members`: the registered teachers, by id. `jobs`: those whose students are registered.
    """

    name: str
    running: int | None = None
    wanted: int | None = None
    teachers: int | None = None
    students: int | None = None
    busy: float | None = None
    waiting: float | None = None
    limit: str = ""
    members: tuple[TeacherLine, ...] = ()
    jobs: tuple[str, ...] = ()


class MonitorSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state at a time, `at`, in Unix seconds.

    - `submitted`: the trainings that have not ended, by name; `pending`: those with fewer running instances than their
      minimum; `suspended`: those of the pending that were suspended.
    - `trainers`: running trainers by training.
    - `use`: of each resource, by name; empty while the nodes are unknown.
    - `jobs`: the trainings and pools that have not ended, `ended`: those that have, and are not removed.
    - `pools`: the pools that have not ended, and those started by hand.
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
    ended: tuple[JobLine, ...] = ()
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
    pools: Mapping[str, PoolInfo],
    at: float,
    *,
    reports: Mapping[str, JobReport] = {},
    refused: Mapping[str, str] = {},
    lacks: Sequence[str] = (),
) -> MonitorSnapshot:
    """Return the snapshot of these parts. `refused`: why jobs could not be resized as planned, by name."""
    everything = sorted(jobs, key=lambda job: job.name)
    active = [job for job in everything if not job.has_ended]
    trainings = [job for job in active if job.kind == "trainer"]
    own = {job.name: job for job in active if job.kind == "pool"}
    states = {job.name: history.job_state(job) for job in trainings}
    targets = {target.name: target for target in plan.targets} if plan else {}
    for name in refused.keys() & targets.keys():
        targets[name] = msgspec.structs.replace(targets[name], reason=refused[name])
    lines = {job.name: job_line(job, reports.get(job.name), targets.get(job.name)) for job in everything}
    answered = Counter[str]()
    for report in reports.values():
        answered.update(report.progress.answered if report.progress else {})
    return MonitorSnapshot(
        at=at,
        submitted=tuple(states),
        pending=tuple(name for name, state in states.items() if state != "running"),
        suspended=tuple(name for name, state in states.items() if state == "suspended"),
        trainers={job.name: history.running_count(job) for job in trainings},
        use=history.resource_use(active, capacity, plan),
        jobs=tuple(lines[job.name] for job in active),
        ended=tuple(lines[job.name] for job in everything if job.has_ended),
        pools=tuple(
            _pool_line(name, own.get(name), pools.get(name), answered, states.keys()) for name in sorted({*own, *pools})
        ),
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


def job_line(job: JobStatus, report: JobReport | None, target: JobTarget | None = None) -> JobLine:
    """Return the line of one job. `report`: what Redis knows of it; `target`: of the last plan.

    A report that nothing can be made of is told as the job's trouble.
    """
    try:
        with isolated(f"what Redis has of job {job.name!r}"):
            return _job_line(job, report or JobReport(), target)
    except UnexpectedError as error:
        return _job_line(job, JobReport(problem=str(error)), target)


def _job_line(job: JobStatus, report: JobReport, target: JobTarget | None) -> JobLine:
    progress, group, still = report.progress, report.group, standstill(job, report)
    if progress and still:
        progress = msgspec.structs.replace(progress, samples_per_s=0.0, time_left_s=None)
    orphan = f"orphan: {report.orphan.why}" if report.orphan else ""
    return JobLine(
        name=job.name,
        kind=job.kind,
        state=_state(job),
        running=history.running_count(job),
        wanted=job.wanted,
        bounds=job.scaling.bounds if job.scaling else None,
        target=target.target if target else None,
        reason=target.reason if target else "",
        trouble=orphan or job.reason or report.problem or (still.message if still else group_trouble(job, report)),
        origin=job.origin,
        orphan=report.orphan,
        progress=progress,
        share=progress.share if progress else None,
        limit=progress.verdict() if progress else "",
        generation=group.generation if group else 0,
        checkpoint=group.checkpoint if group else None,
        resize=group.resize if group else None,
        stragglers=group.stragglers if group else {},
    )


def _state(job: JobStatus) -> JobState | Literal["succeeded", "failed"]:
    if job.phase == "succeeded" or job.phase == "failed":  # noqa: PLR1714 - for mypy
        return job.phase
    return history.job_state(job)


def _pool_line(
    name: str, job: JobStatus | None, pool: PoolInfo | None, answered: Mapping[str, int], jobs: Collection[str]
) -> PoolLine:
    if pool and pool.problem:
        pool = None
    demand = pool.demand if pool else None
    return PoolLine(
        name=name,
        running=history.running_count(job) if job else None,
        wanted=job.wanted if job else None,
        teachers=len(demand.teachers) if demand else None,
        students=len(demand.students) if demand else None,
        busy=demand.busy if demand else None,
        waiting=demand.waiting if demand else None,
        limit=_limit(name, demand) if demand else "",
        members=tuple(_teacher_line(teacher, answered) for teacher in pool.teachers) if pool else (),
        jobs=tuple(sorted({job_of_student(one.id) for one in pool.students}.intersection(jobs))) if pool else (),
    )


def _limit(pool: str, demand: PoolDemand) -> str:
    try:
        with isolated(f"what is reported in pool {pool!r}"):
            return describe_limit(demand)
    except UnexpectedError as error:
        return str(error)


def _teacher_line(teacher: TeacherInfo, answered: Mapping[str, int]) -> TeacherLine:
    report = teacher.report
    own = report.answered if report else None
    return TeacherLine(
        id=teacher.id,
        address=teacher.address,
        weight=teacher.weight,
        busy=report.busy if report else None,
        answered=answered.get(teacher.address) if own is None else own,
        quarantine=str(teacher.quarantine or ""),
    )


# Taking a snapshot of a backend and Redis.

PLAN_HOLDS_S = 900.0
"""Targets of an older plan are not shown: whatever rescales does so more often."""

OUTDATED = "its targets are not shown"
UNKNOWN = "progress, members of pools, targets and the past are unknown"


async def take_snapshot(
    backend: Backend, client: Redis | None, namespace: str, *, jobs: Sequence[JobStatus] | None = None
) -> MonitorSnapshot:
    """Return the current snapshot, and record a point in Redis for `edl monitor --history`.

    `jobs`: those that the backend has just listed; None to list them here.

    What can't be read, as while Redis is down or a record is damaged, is listed in `lacks`. Raises BackendError if the
    jobs can't be read.
    """
    listed, (capacity, lacks) = await all_completed(_listed(backend, jobs), _capacity(backend))
    now = time.time()
    plan: RescalingPlan | None = None
    pools: dict[str, PoolInfo] = {}
    reports: dict[str, JobReport] = {}
    refused: dict[str, str] = {}
    if client is None:
        lacks.append(f"EDL_REDIS_URL names no Redis: {UNKNOWN}")
    else:
        try:
            done, reports, members = await all_completed(
                history.last_pass(client, namespace, backend.place),
                read_reports(client, namespace, listed),
                list_pools(client, namespace),
            )
            pools = {pool.name: pool for pool in members}
            lacks.extend(f"pool {pool.name!r}: {pool.problem}" for pool in members if pool.problem)
            plan, refused = (done.plan, done.refused) if done else (None, {})
            if plan and now - plan.at > PLAN_HOLDS_S:
                lacks.append(f"the last rescaling was {(now - plan.at) / 60:.0f} min ago; {OUTDATED}")
                plan = None
            point = history.history_point(listed, capacity, plan)
            await history.record_point(client, namespace, backend.place, point)
        except RegistryError as error:
            lacks.append(f"{UNKNOWN}: {error}")
            reports = reports or unknown_reports(listed)
    return build_snapshot(listed, capacity, plan, pools, now, reports=reports, refused=refused, lacks=lacks)


async def _listed(backend: Backend, jobs: Sequence[JobStatus] | None) -> Sequence[JobStatus]:
    return await backend.list() if jobs is None else jobs


async def _capacity(backend: Backend) -> tuple[Capacity, list[str]]:
    """Return the nodes; or none and the error."""
    try:
        return await backend.capacity(), []
    except BackendError as error:
        return Capacity(nodes=()), [f"what nodes have is unknown: {error}"]
