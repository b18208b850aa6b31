"""Jobs and nodes as a backend would tell of them."""

from __future__ import annotations

from collections.abc import Mapping

from edl_runtime.backends.base import Capacity, InstanceStatus, JobStatus, NodeCapacity, Phase, Scaling
from edl_runtime.specs import Bounds, JobKind


def job(
    name: str,
    running: int,
    wanted: int | None = None,
    *,
    kind: JobKind = "trainer",
    phase: Phase | None = None,
    resources: Mapping[str, float] | None = None,
    reason: str = "",
) -> JobStatus:
    """Return a job of which so many instances run, all that are wanted unless told otherwise; the rest is pending."""
    wanted = running if wanted is None else wanted
    instances = [
        InstanceStatus(index=index, phase="running" if index < running else "pending", started_at=1.0)
        for index in range(max(running, wanted))
    ]
    return JobStatus(
        name=name,
        kind=kind,
        phase=phase or ("running" if running else "pending"),
        token="",
        digest="",
        wanted=wanted,
        scaling=Scaling(bounds=Bounds(1, 100), resources=dict(resources or {})),
        instances=tuple(instances),
        created_at=1.0,
        reason=reason,
    )


def node(name: str = "node", *, total: Mapping[str, float], used: Mapping[str, float]) -> NodeCapacity:
    """Return a node of which so much is used."""
    free = {resource: amount - used.get(resource, 0.0) for resource, amount in total.items()}
    return NodeCapacity(name=name, total=dict(total), free=free)


def capacity(*nodes: NodeCapacity) -> Capacity:
    return Capacity(nodes=nodes)
