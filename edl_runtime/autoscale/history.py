"""The last pass, and a history of what ran when: a stream of points in Redis, shown by `edl monitor --history`.

Each place has its own; see `Backend.place`.

Each rescaling pass and each refresh of `edl monitor` records a point. A point is kept when it differs from the last
one, or when that is a minute old; of those within five seconds, the first and the last are kept.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from edl_runtime.autoscale.planner import MeasuredTraffic, RescalingPlan, RescalingRules
from edl_runtime.autoscale.policy.interface import Policy, policy_name
from edl_runtime.backends.interface import Capacity, JobStatus, token_owner
from edl_runtime.specs import JobKind
from edl_runtime.store import keys
from edl_runtime.store.redis_client import decode_record, run_script, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

JobState = Literal["running", "pending", "suspended"]

TWO_WITHIN_MS = 5_000
"""Within this time there are at most two points: the first and the newest."""

SAME_AFTER_MS = 60_000
"""A point that equals the last one is kept once that one is this old."""

MOST_POINTS = 10_000
MOST_BYTES = 16 << 20
"""Bounds of the stream, of which the tighter one counts. Redis may keep a few points more."""

KEPT_S = 7 * 24 * 3600
"""How long the stream outlives its last point."""

HOLDS_S = 900.0
"""A point holds until the next one, and for at most this long; after that nothing was observed."""


class ResourceUse(msgspec.Struct, frozen=True, kw_only=True):
    """A resource of the cluster, in its own unit.

    - `total`: of all nodes; `reserved`: by everything that runs there; `ours`: by jobs and pools.
    - `allowed`: what resizable jobs and pools may use now; None when nothing rescales.
    """

    total: float
    reserved: float
    ours: float = 0.0
    allowed: float | None = None

    @property
    def share(self) -> float | None:
        """The reserved share, 0 to 1; None where the total is 0."""
        return self.reserved / self.total if self.total else None


class JobPoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job or pool that had not ended, and how many of its instances ran. `owner`: see `owner_mark`."""

    running: int = 0
    state: JobState = "running"
    kind: JobKind = "trainer"
    owner: str = ""


class HistoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What was observed `at` a time, in Unix seconds of Redis's clock.

    `window`: empty when nothing rescales. `traffic`: as measured then; None without a traffic source.
    """

    jobs: dict[str, JobPoint]
    use: dict[str, ResourceUse]
    window: str = ""
    traffic: MeasuredTraffic | None = None
    at: float = 0.0


async def record_point(client: Redis, namespace: str, place: str, seen: HistoryPoint) -> bool:
    """Add a point unless it repeats the last one; return whether it was added.

    Raises RegistryUnavailableError.
    """
    point = msgspec.json.encode(_dated(seen, 0.0)).decode()  # when equal things were seen makes no difference
    most = max(1, min(MOST_POINTS, MOST_BYTES // len(point)))
    args: list[str | int] = [point, TWO_WITHIN_MS, SAME_AFTER_MS, most, KEPT_S]
    return bool(await run_script(client, "history_record", [keys.history(namespace, place)], args))


async def read_points(client: Redis, namespace: str, place: str, *, since: float) -> list[HistoryPoint]:
    """Return the points from `since` (Unix seconds), oldest first, with the one that held at `since`, if any.

    Of more than the newest `MOST_POINTS`, and of more than `MOST_BYTES`, the rest is left out.

    Raises RegistryUnavailableError.
    """
    key = keys.history(namespace, place)
    first = max(1, math.floor(since * 1000))
    after: list[str | int] = ["+", f"{first}-0", MOST_POINTS, MOST_BYTES]
    before: list[str | int] = [f"({first}-0", max(0, first - int(HOLDS_S * 1000)), 1, MOST_BYTES]
    found = [await run_script(client, "history_points", [key], limits) for limits in (after, before)]
    return await asyncio.to_thread(_points, [*found[1], *reversed(found[0])])  # megabytes of JSON


def _points(entries: Iterable[tuple[str, str]]) -> list[HistoryPoint]:
    return [found for entry in entries if (found := _point(*entry))]


def _point(entry: str, content: str) -> HistoryPoint | None:
    """Return a stream entry as a point; None for one that this version can't read."""
    found = decode_record(content, HistoryPoint)
    return found and _dated(found, int(entry.partition("-")[0]) / 1000)


def _dated(point: HistoryPoint, at: float) -> HistoryPoint:
    traffic = point.traffic and msgspec.structs.replace(point.traffic, at=at)
    return msgspec.structs.replace(point, at=at, traffic=traffic)


# A point from the state of jobs and nodes. Pure.


def history_point(jobs: Iterable[JobStatus], capacity: Capacity, plan: RescalingPlan | None) -> HistoryPoint:
    """Return the point of these jobs and nodes. Redis gives it its time."""
    active = sorted((job for job in jobs if not job.has_ended), key=lambda job: job.name)
    return HistoryPoint(
        jobs={
            job.name: JobPoint(
                running=running_count(job),
                state=job_state(job),
                kind=job.kind,
                owner=owner_mark(token_owner(job.token)),
            )
            for job in active
        },
        use=resource_use(active, capacity, plan),
        window=plan.window if plan else "",
        traffic=plan.traffic if plan else None,
    )


@functools.lru_cache(maxsize=10_000)
def owner_mark(owner: str) -> str:
    """Return a short text for an owner, empty for none: names can be another owner's later, and points are many."""
    return hashlib.blake2b(owner.encode(), digest_size=4).hexdigest() if owner else ""


def running_count(job: JobStatus) -> int:
    """Return how many of a job's instances run."""
    return sum(instance.phase == "running" for instance in job.instances)


def job_state(job: JobStatus) -> JobState:
    """Return the state of a job that has not ended: "running" from its minimum of running instances on.

    It is "suspended" from when it is resized to 0, also while its instances leave.
    """
    if job.is_suspended:
        return "suspended"
    return "running" if running_count(job) >= (job.scaling.bounds.min if job.scaling else 1) else "pending"


def resource_use(jobs: Iterable[JobStatus], capacity: Capacity, plan: RescalingPlan | None) -> dict[str, ResourceUse]:
    """Return the use of each resource that a node has. Only running instances reserve."""
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
    """Round, so that floating-point noise is no change."""
    return round(quantity, 6)


# The last pass

OTHER_RULES_S = 600.0
"""A pass by other rules that was longer ago is no other rescaler's: each makes one every few minutes."""

PASS_KEPT_S = 24 * 3600
"""How long the last pass is kept."""


class RescaleOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The `plan` of a pass, and the errors of the jobs that could not be resized (`refused`), by name.

    `rules`, `policy`: by which it was made, the policy as "module:function"; None and empty if that is not kept. The
    rules have the declared windows alone, as others read them from Redis, where no one may name a source for them to
    ask: `had_source` says whether there was one.
    """

    plan: RescalingPlan
    refused: dict[str, str] = {}
    rules: RescalingRules | None = None
    policy: str = ""
    had_source: bool = False


def rescale_outcome(
    plan: RescalingPlan, refused: Mapping[str, str], rules: RescalingRules, policy: Policy
) -> RescaleOutcome:
    """Return what a pass has decided and done, by these rules and this policy, with what others may know of them."""
    windows = rules.windows
    return RescaleOutcome(
        plan=plan,
        refused=dict(refused),
        rules=msgspec.structs.replace(rules, windows=windows and windows.declared()),
        policy=policy_name(policy),
        had_source=bool(windows and windows.traffic),
    )


def rules_note(before: RescaleOutcome | None, now: RescaleOutcome) -> str:
    """Return a warning if the pass before went by other rules; empty if not, or if it was long ago.

    Two rescalers of one place with different rules, as a controller and a DAG, would undo each other's resizes.
    """
    if before is None or before.rules is None or now.rules is None:
        return ""
    ago_s = now.plan.at - before.plan.at
    named = {
        "policy": (before.policy, now.policy),
        "traffic windows": (before.rules.windows, now.rules.windows),
        "max_load": (before.rules.max_load, now.rules.max_load),
    }
    differing = [name for name, (then, here) in named.items() if then != here]
    if not differing or ago_s > OTHER_RULES_S:
        return ""
    return (
        f"the pass of {ago_s:.0f} s ago went by other rules ({', '.join(differing)}): "
        "if two rescalers act here, stop one, or give both the same"
    )


async def save_pass(client: Redis, namespace: str, place: str, done: RescaleOutcome) -> None:
    """Let others see what a pass has decided. Raises RegistryUnavailableError."""
    with unavailable_if_lost(client):
        await client.set(keys.plan(namespace, place), msgspec.json.encode(done), ex=PASS_KEPT_S)


async def last_pass(client: Redis, namespace: str, place: str) -> RescaleOutcome | None:
    """Return what the last pass has decided, for each job and why, by which windows, and what could not be done.

    None when there was none within a day; None, too, for what can't be read. Raises RegistryUnavailableError.
    """
    key = keys.plan(namespace, place)
    with unavailable_if_lost(client, key):
        kept = await client.getrange(key, 0, MOST_BYTES)
    return decode_record(kept, RescaleOutcome)
