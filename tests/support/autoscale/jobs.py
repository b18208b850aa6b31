"""Jobs, nodes and history points, as a backend and Redis return them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from edl_runtime.autoscale.history import HistoryPoint, JobPoint, JobState, ResourceUse
from edl_runtime.backends.interface import Capacity, InstanceStatus, JobStatus, NodeCapacity, Scaling
from edl_runtime.pool_reports import StudentReport, TeacherReport
from edl_runtime.registry.pools import PoolInfo, Quarantine, StudentInfo, TeacherInfo
from edl_runtime.specs import Bounds

SCALING = set(Scaling.__struct_fields__) - {"bounds", "resources"}
"""Fields of a job's scaling."""

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC).timestamp()


def job(name: str, bounds: Bounds, cpu: float, have: int, *, pending: int = 0, **more: Any) -> JobStatus:
    """Return a job of elastic trainers with `have` instances on the node and `pending` ones."""
    scaling = {name: more.pop(name) for name in SCALING if name in more}
    resources = more.pop("resources", {"cpu": cpu})
    there = [InstanceStatus(index=index, phase="running", started_at=NOON - 4000, node="node") for index in range(have)]
    waiting = [InstanceStatus(index=have + index, phase="pending", started_at=NOON - 4000) for index in range(pending)]
    phase = "running" if have else "pending"
    given = {"kind": "trainer", "elastic": True, "phase": phase, "token": ""}
    given |= {"created_at": NOON - 5000, "wanted": have + pending}
    return JobStatus(
        name=name,
        digest="",
        instances=(*there, *waiting),
        scaling=Scaling(bounds=bounds, resources=resources, **{"resumes": True, **scaling}),
        **{**given, **more},
    )


def running_job(
    name: str, running: int, wanted: int | None = None, *, resources: Mapping[str, float] | None = None, **more: Any
) -> JobStatus:
    """Return a job with `running` of `wanted` instances, by default all; the others are pending."""
    wanted = running if wanted is None else wanted
    pending = max(0, wanted - running)
    return job(name, Bounds(1, 100), 0.0, running, pending=pending, resources=resources or {}, wanted=wanted, **more)


def node(name: str = "node", *, total: Mapping[str, float], used: Mapping[str, float]) -> NodeCapacity:
    """Return a node with `used` of `total` resources."""
    free = {resource: amount - used.get(resource, 0.0) for resource, amount in total.items()}
    return NodeCapacity(name=name, total=dict(total), free=free)


def capacity(*nodes: NodeCapacity) -> Capacity:
    return Capacity(nodes=nodes)


def pool(
    name: str,
    teachers: Mapping[str, TeacherReport | None] | None = None,
    students: Mapping[str, StudentReport | None] | None = None,
    **quarantine: Quarantine,
) -> PoolInfo:
    """Return a pool by its members' reports; each teacher's address is its id with a port."""
    return PoolInfo(
        name=name,
        model=None,
        teachers=tuple(
            TeacherInfo(
                id=each, address=f"{each}:1", weight=1.0, fence=1, quarantine=quarantine.get(each), report=report
            )
            for each, report in (teachers or {}).items()
        ),
        students=tuple(
            StudentInfo(id=each, address="", want=None, fence=1, report=report)
            for each, report in (students or {}).items()
        ),
    )


def past(at: float, *, window: str = "", cpu: ResourceUse | None = None, **jobs: int | JobState) -> HistoryPoint:
    """Return a history point with the running instances or the state of each job."""
    return HistoryPoint(
        at=at,
        jobs={
            name: JobPoint(running=job) if isinstance(job, int) else JobPoint(state=job) for name, job in jobs.items()
        },
        use={"cpu": cpu} if cpu else {},
        window=window,
    )
