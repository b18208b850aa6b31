"""What jobs do and what is reserved now, as it is shown and remembered. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edl_runtime.autoscale.history import JobPoint, Point, State, Use
from edl_runtime.autoscale.plan import Plan
from edl_runtime.backends.base import Capacity, JobStatus


def point(jobs: Iterable[JobStatus], capacity: Capacity, plan: Plan | None) -> Point:
    """Return what there is to remember of a look at all jobs and at the cluster; it gets its time in Redis."""
    going = sorted((job for job in jobs if not job.has_ended), key=lambda job: job.name)
    return Point(
        jobs={job.name: JobPoint(running=running(job), state=state(job), kind=job.kind) for job in going},
        use=use(going, capacity, plan),
        window=plan.window if plan else "",
    )


def running(job: JobStatus) -> int:
    """Return how many of its instances run."""
    return sum(instance.phase == "running" for instance in job.instances)


def state(job: JobStatus) -> State:
    """Return whether a job that has not ended runs, by as many instances as it needs at least, and whether it is to."""
    if running(job) >= (job.scaling.bounds.min if job.scaling else 1):
        return "running"
    return "pending" if job.wanted else "suspended"


def use(jobs: Iterable[JobStatus], capacity: Capacity, plan: Plan | None) -> dict[str, Use]:
    """Return the use of each resource that a node has. Instances without a place reserve nothing."""
    placed = [(job.scaling.resources, running(job)) for job in jobs if job.scaling and not job.has_ended]
    allowed: Mapping[str, float] = plan.capacity if plan else {}
    free = capacity.free
    return {
        name: Use(
            total=_rounded(total),
            reserved=_rounded(total - free.get(name, 0.0)),
            ours=_rounded(sum(each.get(name, 0.0) * count for each, count in placed)),
            allowed=_rounded(allowed[name]) if name in allowed else None,
        )
        for name, total in capacity.total.items()
    }


def _rounded(quantity: float) -> float:
    """Return a quantity without what arithmetic adds to it, which is no change."""
    return round(quantity, 6)
