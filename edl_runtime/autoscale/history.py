"""History of what ran when: a stream of points in Redis, drawn by `edl monitor --history`.

Each pass of the rescaler writes one, and so does each look of a running `edl monitor`. Any number of writers may: a
point is kept when something has changed since the last one, or when that is a minute old, and never two within five
seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from edl_runtime.autoscale.planner import RescalingPlan
from edl_runtime.backends.interface import Capacity, JobStatus
from edl_runtime.specs import JobKind
from edl_runtime.store import keys
from edl_runtime.store.redis_client import decode_record, run_script, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

JobState = Literal["running", "pending", "suspended"]

TWO_WITHIN_MS = 5_000
"""In so long there are two points at most: the first, and the newest."""

SAME_AFTER_MS = 60_000
"""A point that says what the last one says is kept once that one is so old."""

MOST_POINTS = 10_000
MOST_BYTES = 16 << 20
"""So much is kept, and of two bounds the tighter one counts; a few more points may be there."""

KEPT_S = 7 * 24 * 3600
"""How long the stream outlives its last point."""

HOLDS_S = 900.0
"""A point tells how things were until the next one, and for no longer than this: then nobody looked."""

_FIELD = "point"


class ResourceUse(msgspec.Struct, frozen=True, kw_only=True):
    """Of a resource of the cluster, in its own unit, how much there is and who has it.

    - `total`: of all nodes together; `reserved`: by everybody who runs there, `ours`: by jobs and pools.
    - `allowed`: what those of them that can be resized may use now; None when nobody rescales.
    """

    total: float
    reserved: float
    ours: float = 0.0
    allowed: float | None = None

    @property
    def share(self) -> float | None:
        """What is reserved of all, 0 to 1; None where there is nothing to reserve."""
        return self.reserved / self.total if self.total else None


class JobPoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job or pool that had not ended: how many of its instances ran."""

    running: int = 0
    state: JobState = "running"
    kind: JobKind = "trainer"


class HistoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen `at` a time, in Unix seconds of Redis's clock. `window`: that held, empty when nobody rescales."""

    jobs: dict[str, JobPoint]
    use: dict[str, ResourceUse]
    window: str = ""
    at: float = 0.0


async def record_point(client: Redis, namespace: str, seen: HistoryPoint) -> bool:
    """Add a point, unless the last one says the same; of many within seconds two stay. Returns whether it was added.

    Raises RegistryUnavailableError.
    """
    told = msgspec.json.encode(msgspec.structs.replace(seen, at=0.0)).decode()
    most = max(1, min(MOST_POINTS, MOST_BYTES // len(told)))
    args: list[str | int] = [told, TWO_WITHIN_MS, SAME_AFTER_MS, most, KEPT_S]
    return bool(await run_script(client, "history_record", [keys.history(namespace)], args))


async def read_points(client: Redis, namespace: str, *, since: float) -> list[HistoryPoint]:
    """Return the points from `since` (Unix seconds) on, the oldest first, and the one that held then, if any.

    Raises RegistryUnavailableError.
    """
    key = keys.history(namespace)
    first = max(1, math.floor(since * 1000))
    with unavailable_if_lost(client):
        before: Any = await client.xrevrange(
            key, max=f"({first}-0", min=str(max(0, first - int(HOLDS_S * 1000))), count=1
        )
        after: Any = await client.xrange(key, min=f"{first}-0")
    return [found for entry in (*before, *after) if (found := _point(*entry))]


def _point(entry: str, fields: Mapping[str, str]) -> HistoryPoint | None:
    """Return what stands in the stream; None for what another version wrote that this one can't read."""
    found = decode_record(fields.get(_FIELD), HistoryPoint)
    return found and msgspec.structs.replace(found, at=int(entry.partition("-")[0]) / 1000)


# What jobs do and what is reserved now, as it is shown and remembered. Pure.


def history_point(jobs: Iterable[JobStatus], capacity: Capacity, plan: RescalingPlan | None) -> HistoryPoint:
    """Return what there is to remember of a look at all jobs and at the cluster; it gets its time in Redis."""
    going = sorted((job for job in jobs if not job.has_ended), key=lambda job: job.name)
    return HistoryPoint(
        jobs={job.name: JobPoint(running=running_count(job), state=job_state(job), kind=job.kind) for job in going},
        use=resource_use(going, capacity, plan),
        window=plan.window if plan else "",
    )


def running_count(job: JobStatus) -> int:
    """Return how many of its instances run."""
    return sum(instance.phase == "running" for instance in job.instances)


def job_state(job: JobStatus) -> JobState:
    """Return whether a job that has not ended runs, by as many instances as it needs at least, and whether it is to."""
    if running_count(job) >= (job.scaling.bounds.min if job.scaling else 1):
        return "running"
    return "pending" if job.wanted else "suspended"


def resource_use(jobs: Iterable[JobStatus], capacity: Capacity, plan: RescalingPlan | None) -> dict[str, ResourceUse]:
    """Return the use of each resource that a node has. Instances without a place reserve nothing."""
    placed = [(job.scaling.resources, running_count(job)) for job in jobs if job.scaling and not job.has_ended]
    allowed: Mapping[str, float] = plan.capacity if plan else {}
    free = capacity.free
    return {
        name: ResourceUse(
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
