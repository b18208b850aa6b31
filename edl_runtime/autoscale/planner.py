"""Makes a rescaling plan from a snapshot: applies the policy under traffic windows. Pure.

Training may use what the windows leave it, and of the cluster's highest load what other pods leave. Jobs that can't
be resized, as those that are not elastic, keep what they have, and are subtracted first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import NamedTuple

import msgspec

from edl_runtime.autoscale.cluster.snapshot import ClusterSnapshot
from edl_runtime.autoscale.policy.decide import STARVATION_S
from edl_runtime.autoscale.policy.decide import decide as default_policy
from edl_runtime.autoscale.policy.interface import Policy, protected_targets
from edl_runtime.autoscale.policy.model import (
    Limit,
    Node,
    Target,
    Workload,
    milli_available,
    milli_needed,
)
from edl_runtime.autoscale.traffic.capacity import LEAD_S, TrainingCapacity, training_capacity
from edl_runtime.autoscale.traffic.forecast import latest_sample
from edl_runtime.autoscale.traffic.windows import DeclaredWindows, WindowSpan
from edl_runtime.backends.interface import Capacity, JobStatus, Scaling
from edl_runtime.backends.placement import may_run_on
from edl_runtime.errors import SpecError
from edl_runtime.pods import MAX_QUANTITY, is_counted
from edl_runtime.specs import Bounds, JobKind

PAUSE_S = 1.0
"""How long a resize stops a job: rounded up from what `benchmarks/resize.py` measures for live and warm ones."""

UNLIMITED = "instance"
"""Stands for the resources of an instance, one of it, where a quota limits none of them."""

PLENTY = 1e6
"""More than any node has instances."""


class RescalingRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a plan.

    - `windows`: what training may use at which time; None for everything at any time.
    - `max_load`: the share of CPU and memory that everything on the nodes together may reserve. Devices count whole.
    - `lead_s`: how long before a window with less for training jobs shrink.
    - `pause_s`: how long a resize stops a job.

    Raises SpecError.
    """

    windows: DeclaredWindows | None = None
    max_load: float = 1.0
    lead_s: float = LEAD_S
    pause_s: float = PAUSE_S

    def __post_init__(self) -> None:
        if not 0 < self.max_load <= 1:
            raise SpecError("max_load", self.max_load, "a share above 0, up to 1")
        for field in ("lead_s", "pause_s"):
            if not 0 <= getattr(self, field) < STARVATION_S:
                raise SpecError(field, getattr(self, field), f"seconds, 0 to {STARVATION_S:g}")


class JobTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A job or pool: its requested `instances` now, its `target`, and the `reason`."""

    name: str
    kind: JobKind
    instances: int
    target: int
    reason: str


class FollowingWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A traffic window that begins soon, by name; `start` and `end` in Unix seconds, None for no end."""

    name: str
    start: float
    end: float | None = None


class MeasuredTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a `resource` the web `needed` when it was last measured, `at` a time in Unix seconds."""

    resource: str
    needed: float
    at: float


class RescalingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The targets of a pass.

    - `at`: the snapshot's time, in Unix seconds.
    - `window`: the traffic window that holds, "default" between windows, empty without any; `until`: its end, in
      Unix seconds, None for none; `why`: what limits training, in words.
    - `following`: the windows that begin within the lead time, for which jobs shrink already.
    - `capacity`: what all resizable jobs and pools may use together, by resource.
    - `targets`: of each resizable job and pool, sorted by name.
    - `notes`: warnings about the windows.
    - `traffic`: what the web needs, as last measured; None without a traffic source.
    """

    at: float
    window: str = ""
    until: float | None = None
    why: str = ""
    following: tuple[FollowingWindow, ...] = ()
    capacity: dict[str, float]
    targets: tuple[JobTarget, ...] = ()
    notes: tuple[str, ...] = ()
    traffic: MeasuredTraffic | None = None

    @property
    def changes(self) -> tuple[JobTarget, ...]:
        """The targets that change something; shrinking jobs come first, so that others find room."""
        differing = [one for one in self.targets if one.target != one.instances]
        return tuple(sorted(differing, key=lambda one: one.target > one.instances))


def make_plan(
    snapshot: ClusterSnapshot, rules: RescalingRules, policy: Policy = default_policy, *, stuck: Mapping[str, str] = {}
) -> RescalingPlan:
    """Return the plan of a snapshot.

    `stuck`: the jobs that keep what they have because a resize has just failed, by name, and the reason.
    """
    moment = datetime.fromtimestamp(snapshot.at, UTC)
    active = [job for job in snapshot.jobs if not job.has_ended and job.scaling]
    resizable = {job.name: job for job in active if _can_be_resized(job) or _may_grow_in_queue(job)}
    stopped = {job.name: job for job in active if _is_stopped_by_queue(job)}
    movable = [job for job in resizable.values() if job.name not in stuck]
    fixed = [job for job in active if job.name in stuck or job.name not in resizable]
    room, why = None, ""
    if rules.windows:
        room = _capacity_by_windows(snapshot, rules.windows, active, rules.lead_s)
        why = room.why if rules.windows.time_zone == "UTC" else f"{room.why} ({rules.windows.time_zone})"
    capacity = _capacity_for_jobs(room, snapshot.capacity, movable, fixed, rules.max_load)
    spans = list(rules.windows.spans(moment, lead_s=rules.lead_s)) if rules.windows else []
    view = _NodeView(snapshot.capacity)
    use = _pool_use(snapshot, movable, fixed)
    jobs = [_to_workload(job, snapshot, spans, capacity, view, use=use) for job in movable]
    jobs = [_without_stranded(job, _stranded(resizable[job.name], job, view)) for job in jobs]
    targets = protected_targets(policy, jobs, view.nodes(), capacity, now_s=snapshot.at, pause_s=rules.pause_s)
    targets |= {job.name: _with_stranded(targets[job.name], job) for job in jobs if job.stranded}
    targets |= {
        name: Target(instances=_scaling(job).bounds.min, reason="asks its queue for its minimum")
        for name, job in stopped.items()
    }
    resizable |= stopped
    targets |= {
        name: Target(instances=resizable[name].wanted, reason=f"stays as it is: {why}") for name, why in stuck.items()
    }
    return RescalingPlan(
        at=snapshot.at,
        window=spans[0].name if spans else "",
        until=spans[0].end.timestamp() if spans and spans[0].end else None,
        why=why,
        following=tuple(
            FollowingWindow(
                name=span.name, start=span.start.timestamp(), end=span.end.timestamp() if span.end else None
            )
            for span in spans[1:]
            if span.start
        ),
        capacity=capacity,
        targets=tuple(
            JobTarget(
                name=name,
                kind=resizable[name].kind,
                instances=resizable[name].wanted,
                target=target.instances,
                reason=target.reason,
            )
            for name, target in sorted(targets.items())
            if _can_be_resized(resizable[name]) or target.instances > resizable[name].wanted or name in stopped
        ),
        notes=tuple(_notes(spans, active)),
        traffic=_measured(snapshot),
    )


def _measured(snapshot: ClusterSnapshot) -> MeasuredTraffic | None:
    forecast = snapshot.forecast
    last = latest_sample(forecast.recent, snapshot.at) if forecast else None
    if not forecast or not last:
        return None
    return MeasuredTraffic(resource=forecast.resource, needed=last.needed, at=last.at_s)


def _capacity_by_windows(
    snapshot: ClusterSnapshot, windows: DeclaredWindows, jobs: Sequence[JobStatus], lead_s: float
) -> TrainingCapacity:
    """Return what the windows leave to training. What it has on closed nodes stays, beside its share of the others."""
    there, moment = snapshot.capacity, datetime.fromtimestamp(snapshot.at, UTC)

    def left(total: Mapping[str, float]) -> TrainingCapacity:
        return training_capacity(windows, total, now=moment, forecast=snapshot.forecast, lead_s=lead_s)

    if not there.closed_nodes:
        return left(there.total)
    stays = _reserved(jobs, Capacity(nodes=there.closed_nodes))
    room = left({name: amount - stays.get(name, 0.0) for name, amount in there.total.items()})
    most = left(there.open_total).capacity
    capacity = {name: min(most[name], amount + stays.get(name, 0.0)) for name, amount in room.capacity.items()}
    return msgspec.structs.replace(room, capacity=capacity)


def _capacity_for_jobs(
    room: TrainingCapacity | None,
    there: Capacity,
    resizable: Sequence[JobStatus],
    fixed: Sequence[JobStatus],
    max_load: float,
) -> dict[str, float]:
    """Return what the resizable jobs may use together, by resource.

    That is the least of: the windows' capacity without what fixed jobs have; the highest load without what everything
    else on the nodes reserves; and the quota. The highest load is a share of open nodes; what runs on others stays.
    """
    used, kept = _reserved(resizable, there), _reserved(fixed, there)
    free, closed = there.free, Capacity(nodes=there.closed_nodes).total
    found = {}
    for name, amount in there.total.items():
        ours = used.get(name, 0.0)
        # local processes may reserve more than the node has, so the difference alone could be too small
        others = max(kept.get(name, 0.0), amount - free.get(name, 0.0) - ours)
        stays = amount if is_counted(name) else closed.get(name, 0.0)
        left = [stays + max_load * (amount - stays) - others]
        if room:
            left.append(room.capacity[name] - kept.get(name, 0.0))
        if name in there.quota_left:
            left.append(there.quota_left[name] + ours)
        found[name] = max(0.0, round(min(left), 6))
    return found


def _reserved(jobs: Sequence[JobStatus], capacity: Capacity) -> dict[str, float]:
    """Return what the placed instances of these jobs reserve together."""
    known = {node.name for node in capacity.nodes}
    found: dict[str, float] = {}
    for job in jobs:
        placed = sum(place in known for place in _nodes_of(job, capacity))
        for name, need in _scaling(job).resources.items():
            found[name] = found.get(name, 0.0) + need * placed
    return found


def _can_be_resized(job: JobStatus) -> bool:
    """Whether a job may be resized here. For a job in a queue, the queue decides; see `_may_grow_in_queue`."""
    return job.kind == "pool" or (job.elastic and not _scaling(job).queue)


def _may_grow_in_queue(job: JobStatus) -> bool:
    """Whether a job in a queue may ask it for one more: once the queue has admitted all before, and they run.

    The quota is the queue's, so the most that waits there is one; it starts when the queue has quota for it.
    """
    scaling = _scaling(job)
    running = [one for one in job.instances if one.phase == "running" and not one.leaving]
    return job.elastic and scaling.queue_resizes and 0 < job.wanted == len(running) < scaling.bounds.max


def _is_stopped_by_queue(job: JobStatus) -> bool:
    """Whether a job waits as a whole that has grown. The queue may never have quota again for so many."""
    scaling = _scaling(job)
    waits = bool(scaling.queue) and job.elastic and job.phase == "pending" and not job.instances
    return waits and scaling.resized_at is not None and job.wanted > scaling.bounds.min


def _scaling(job: JobStatus) -> Scaling:
    assert job.scaling  # noqa: S101 - every active job has it
    return job.scaling


def _nodes_of(job: JobStatus, capacity: Capacity) -> tuple[str, ...]:
    """Return the node of each requested instance that was not given up, "" for an unplaced one."""
    living = [one for one in job.instances if not (one.given_up or one.leaving)]
    there = sorted(living, key=lambda one: one.index)[: job.attainable]
    nodes = [capacity.place_of(one) if one.phase in ("pending", "running") else "" for one in there]
    return (*nodes, *[""] * (job.attainable - len(nodes)))


def _to_workload(
    job: JobStatus,
    snapshot: ClusterSnapshot,
    spans: Sequence[WindowSpan],
    capacity: Mapping[str, float],
    view: _NodeView,
    *,
    use: _PoolUse,
) -> Workload:
    scaling = _scaling(job)
    bounds, limit = scaling.bounds, _limit(job, snapshot, spans, capacity)
    if not _can_be_resized(job):  # it grows by one, or stays
        bounds = Bounds(job.wanted, job.wanted + 1)
        limit = limit and Limit(instances=max(limit.instances, job.wanted), reason=limit.reason)
    nodes = _nodes_of(job, snapshot.capacity)
    began_s = min((one.started_at for one in job.instances if one.started_at), default=job.created_at)
    return Workload(
        name=job.name,
        bounds=bounds,
        resources=view.needs(scaling),
        nodes=nodes,
        priority=scaling.priority,
        weight=scaling.weight,
        submitted_s=job.created_at,
        changed_s=began_s if any(nodes) else scaling.resized_at,
        # A pool has no cooldown: its students continue while it is resized. Nor has a job in a queue, which only grows.
        resized_s=None if job.kind == "pool" or scaling.queue else scaling.resized_at,
        by_hand=job.name in snapshot.by_hand,
        speedup=snapshot.speedups.get(job.name),
        limit=limit,
        resumes=scaling.resumes,
        pools=tuple(sorted(use.asked.get(job.name, ()))),
        students=use.others[job.name] if job.kind == "pool" else None,
    )


class _PoolUse(NamedTuple):
    """The pools that are `asked` by a job, by its name; and how many `others`, who stay, use a pool, by its name."""

    asked: Mapping[str, set[str]]
    others: Mapping[str, int]


def _pool_use(snapshot: ClusterSnapshot, movable: Sequence[JobStatus], fixed: Sequence[JobStatus]) -> _PoolUse:
    """Return who uses which pool: the students that have joined it, and jobs by their EDL_POOL."""
    may_go = {job.name for job in movable if job.kind == "trainer"}
    asked, others = defaultdict[str, set[str]](set), Counter[str]()
    for pool in [job for job in movable if job.kind == "pool"]:
        joined = snapshot.students.get(pool.name, ())
        naming = [job for job in (*movable, *fixed) if job.kind == "trainer" and job.pool == pool.pool]
        runs = [job.name for job in naming if job.name not in joined and any(one.node for one in job.instances)]
        others[pool.name] = sum(name not in may_go for name in (*joined, *runs))
        for name in may_go.intersection((*joined, *(job.name for job in naming))):
            asked[name].add(pool.name)
    return _PoolUse(asked, others)


def _stranded(status: JobStatus, job: Workload, view: _NodeView) -> tuple[int, ...]:
    """Return the indexes of instances that lost their node and fit on no other, while later ones are placed.

    The highest index leaves first, so shrinking by them would remove the later ones. They are left pending instead, and
    the policy sizes the rest of the job, if that is at least its minimum. In a pool pending pods leave first.
    """
    last = job.up_to_last_placed
    lost = tuple(index for index, node in enumerate(job.nodes[:last]) if not node)
    if not lost or status.kind == "pool" or view.has_room(_scaling(status)):
        return ()
    return lost if job.bounds.min <= min(last, job.most) - len(lost) else ()


def _without_stranded(job: Workload, stranded: Sequence[int]) -> Workload:
    """Return a job without these instances, which stay listed in `stranded`."""
    if not stranded:
        return job
    return msgspec.structs.replace(
        job,
        nodes=tuple(node for index, node in enumerate(job.nodes) if index not in stranded),
        bounds=Bounds(job.bounds.min, job.bounds.max - len(stranded)),
        limit=job.limit and Limit(instances=job.limit.instances - len(stranded), reason=job.limit.reason),
        stranded=tuple(stranded),
    )


def _with_stranded(target: Target, job: Workload) -> Target:
    """Return a job's target plus the stranded instances below its last one."""
    instances = job.including_stranded(target.instances)
    if instances == target.instances:
        return target
    reason = f"{target.reason}, beside {instances - target.instances} that no node has room for"
    return Target(instances=instances, reason=reason)


def _limit(
    job: JobStatus, snapshot: ClusterSnapshot, spans: Sequence[WindowSpan], capacity: Mapping[str, float]
) -> Limit | None:
    """Return the lowest limit by windows, by the need of a pool's students, and by an instance that can't start."""
    limits = [snapshot.needs[job.name]] if job.kind == "pool" and job.name in snapshot.needs else []
    if problem := next((one.reason for one in job.instances if one.phase == "pending" and one.node and one.reason), ""):
        limits.append(Limit(instances=job.wanted, reason=problem))  # another one would not start either
    for span in spans:
        most = span.sizes.most("pools" if job.kind == "pool" else "jobs", job.name, _scaling(job).resources, capacity)
        if most is not None:
            limits.append(Limit(instances=most, reason=f"{_window(span)} allows {most}"))
    return min(limits, key=lambda limit: limit.instances, default=None)


def _window(span: WindowSpan) -> str:
    return "the time between windows" if span.name == "default" else f"window {span.name!r}"


def _notes(spans: Sequence[WindowSpan], jobs: Sequence[JobStatus]) -> Iterator[str]:
    for span in spans[:1]:
        yield from _unknown("job", span, span.sizes.jobs, [job.name for job in jobs if job.kind == "trainer"])
        yield from _unknown("pool", span, span.sizes.pools, [job.name for job in jobs if job.kind == "pool"])


def _unknown(what: str, span: WindowSpan, sizes: Mapping[str, object], known: Sequence[str]) -> Iterator[str]:
    for name in sizes:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; is {close[0]!r} meant?" if close else ""
            yield f"{_window(span)} has a size for {what} {name!r}, and there is no such {what} now{hint}"


class _NodeView:
    """The nodes as the policy sees them. It knows resources only, so placement rules become made-up resources.

    A job that may run on some nodes only needs one unit of a resource that only those nodes have.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._limited = (
            capacity.total.keys() if capacity.only_node else None
        )  # resources with a quota; None without quotas
        self._kinds: dict[frozenset[str], str] = {}  # the made-up resource of a set of nodes
        self._allowed: dict[bytes, frozenset[str]] = {}  # by placement rules, which most jobs share
        self._rooms: dict[tuple[object, ...], bool] = {}  # whether an instance fits, by nodes and needs

    def needs(self, scaling: Scaling) -> dict[str, float]:
        """Return what an instance needs. With a quota, only the resources that it names count."""
        needs = self._limited_of(scaling.resources) or {UNLIMITED: 1.0}
        allowed = self._allowed_to(scaling)
        if len(allowed) < len(self._capacity.nodes):
            needs[self._kinds.setdefault(allowed, f"place {len(self._kinds)}")] = 1.0
        return needs

    def has_room(self, scaling: Scaling) -> bool:
        """Whether another instance would fit on some node now."""
        allowed = self._allowed_to(scaling)
        needs = self._limited_of(scaling.resources)
        asked = (allowed, *sorted(needs.items()))
        if asked not in self._rooms:
            self._rooms[asked] = any(
                all(milli_available(node.free.get(name, 0.0)) >= milli_needed(need) for name, need in needs.items())
                for node in self._capacity.nodes
                if node.name in allowed
            )
        return self._rooms[asked]

    def nodes(self) -> list[Node]:
        """Return the nodes with what is free, for the jobs passed to `needs` before."""
        unlimited = {} if self._limited is None else {UNLIMITED: PLENTY}
        return [
            Node(
                name=node.name,
                free={name: min(max(0.0, much), MAX_QUANTITY) for name, much in node.free.items()}
                | unlimited
                | {kind: PLENTY for allowed, kind in self._kinds.items() if node.name in allowed},
            )
            for node in self._capacity.nodes
        ]

    def _limited_of(self, resources: Mapping[str, float]) -> dict[str, float]:
        """Return the resources that are limited."""
        return {name: need for name, need in resources.items() if self._limited is None or name in self._limited}

    def _allowed_to(self, scaling: Scaling) -> frozenset[str]:
        """Return the names of the nodes where a job may run."""
        asked = msgspec.json.encode((scaling.node_selector, scaling.tolerations, scaling.node_terms), order="sorted")
        if asked not in self._allowed:
            self._allowed[asked] = frozenset(node.name for node in self._capacity.nodes if may_run_on(scaling, node))
        return self._allowed[asked]
