"""How many instances each job should have: a pure function of jobs, nodes, capacity and what a pause costs.

1. *Admit.* Jobs get their minimum, the highest priority first. Among equals: pools that students use, who have their
   places and do nothing without teachers; those whose turn has just begun, those that have waited for long (the
   longest first), then the smallest minimum first, so that most run; of one minimum those that run, then the
   youngest, for a job that is old already is likely to last (least attained service, as in Tiresias, Gu et al., NSDI
   2019). Who runs and is not admitted is suspended, with a checkpoint. While one that has waited for long could run
   if others' turns were over, no other of its priority starts, so that room is saved for it: nobody starves, short
   of a higher priority or such pools.
2. *Fill.* One instance after the other goes to the job to which it is worth most: the gain in weighted log-goodput for
   the share of the cluster that it takes. The sum of logs is largest when shares are fair (Nash welfare; goodput as in
   Pollux, Qiao et al., OSDI 2021). Without measurements all jobs count as nearly perfect, and the least served comes
   first: max-min.
3. *Hold.* An instance that a job has is worth more than a new one; a job grows only some minutes after it was resized
   last, and if that pays for the pause; one that was suspended waits as long before it starts again.
4. *Pack.* Each instance needs a node with room for all that it needs: best fit. Instances stay where they are, and the
   last of a job leave first.

All counts are whole thousandths, so nothing depends on rounding, and on the same input the answer is the same. Applied
at once and asked again, the policy changes nothing: what was granted only moves up in both orders.

`benchmarks/policy.py` measures it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from edl_runtime.autoscale.policy.allocation import Allocation, Allocator, DenialReason
from edl_runtime.autoscale.policy.model import QUANTUM, Node, Speedup, Target, Workload
from edl_runtime.errors import SpecError

RESIZE_COOLDOWN_S = 300.0
"""A job grows, or starts again, so long after it was resized last."""

PAYBACK_WINDOW_S = 900.0
"""Within so long what a job gains by growing is to make up for its pause,"""

PAYBACK_FACTOR = 1.5
"""so many times."""

MIN_RUN_S = 600.0
"""For so long a job that has started is not suspended for another of its priority."""

STARVATION_S = 14_400.0
"""Who has waited for so long goes before those of its priority that run."""


def decide(
    jobs: Sequence[Workload], nodes: Sequence[Node], capacity: Mapping[str, float], *, now_s: float, pause_s: float
) -> dict[str, Target]:
    """Return the target of each job, by name in the order given.

    `capacity` is what all instances together may use, by resource; of others each node has what it has. `now_s` is by
    the clock of the jobs' times, and `pause_s` how long a resize stops a job. Instances on nodes that are not in
    `nodes` have no place. Raises SpecError for two jobs or nodes of one name, and for capacities below 0.
    """
    _check(jobs, nodes, capacity, pause_s)
    by_rank = sorted(jobs, key=lambda job: _rank(job, now_s))
    allocator = Allocator(by_rank, nodes, capacity)
    _admit(allocator, now_s)
    _hold(allocator, now_s, pause_s)
    _fill(allocator)
    targets = {
        allocation.job.name: Target(
            instances=allocation.granted,
            reason=_reason(allocation, capacity, allocator.resources, pause_s),
            nodes=tuple(nodes[place].name for place in allocation.places()),
        )
        for allocation in allocator.allocations
    }
    return {job.name: targets[job.name] for job in jobs}


def _check(jobs: Sequence[Workload], nodes: Sequence[Node], capacity: Mapping[str, float], pause_s: float) -> None:
    for field, names in (("jobs", [job.name for job in jobs]), ("nodes", [node.name for node in nodes])):
        if len(set(names)) < len(names):
            twice = next(name for number, name in enumerate(names) if name in names[:number])
            raise SpecError(field, twice, "a name for each: this is the name of two")
    for resource, amount in capacity.items():
        if not 0 <= amount < math.inf:
            raise SpecError(f"capacity[{resource!r}]", amount, "a number, 0 or more")
    if not 0 <= pause_s < math.inf:
        raise SpecError("pause_s", pause_s, "seconds, 0 or more")


def _rank(job: Workload, now_s: float) -> tuple[int, int, float, bool, float, str]:
    """Return a key by which jobs are admitted, the least first. Between two passes who was admitted only moves up."""
    since_s = now_s - job.since_s
    if job.students:
        turn, order = -1, float(job.bounds.min)
    elif job.runs and 0 <= since_s < MIN_RUN_S:
        turn, order = 0, 0.0
    elif not job.runs and since_s >= STARVATION_S:
        turn, order = 1, -since_s
    else:
        turn, order = 2, float(job.bounds.min)
    return -job.priority, turn, order, not job.runs, -job.submitted_s, job.name


def _admit(allocator: Allocator, now_s: float) -> None:
    for _, level in groupby(allocator.allocations, key=lambda allocation: allocation.job.priority):
        equals = list(level)
        saving = False
        for allocation in equals:
            job = allocation.job
            if not job.instances and not _cooled_down(job, now_s):
                allocation.denial = DenialReason.RESTS
            elif not job.runs and saving and allocation.most >= allocation.least:
                allocation.denial = DenialReason.SAVED
            elif allocator.admit(allocation):
                continue
            if allocation.denial is DenialReason.LIMIT:
                continue
            if not saving and not job.runs and now_s - job.since_s >= STARVATION_S:
                saving = allocator.would_fit(allocation, equals)


def _cooled_down(job: Workload, now_s: float) -> bool:
    """Return whether it is long enough since a job was resized. A time that has not come yet is a clock that jumped."""
    return job.resized_s is None or not 0 <= now_s - job.resized_s < RESIZE_COOLDOWN_S


def _hold(allocator: Allocator, now_s: float, pause_s: float) -> None:
    """Keep jobs from growing that were resized just now, or would not gain enough by it."""
    ideal: dict[Allocation, int] | None = None
    for allocation in allocator.allocations:
        have = len(allocation.own)
        if not allocation.granted or have < allocation.least or have >= allocation.most:
            continue
        if not _cooled_down(allocation.job, now_s):
            allocation.most, allocation.denial = have, DenialReason.RESTS
        elif allocation.gain(have) > 0 and not _pays_back(allocation.speedup, have, have + 1, pause_s):
            ideal = ideal or allocator.ideal()
            if not _pays_back(allocation.speedup, have, max(ideal[allocation], have + 1), pause_s):
                allocation.most, allocation.denial = have, DenialReason.NO_GAIN


def _pays_back(speedup: Speedup, now: int, then: int, pause_s: float) -> bool:
    goodput = speedup.goodput(now)
    return (speedup.goodput(then) - goodput) * PAYBACK_WINDOW_S > PAYBACK_FACTOR * pause_s * goodput


def _fill(allocator: Allocator) -> None:
    queue = [
        (-allocation.worth(allocation.granted), number, allocation)
        for number, allocation in enumerate(allocator.allocations)
        if 0 < allocation.granted < allocation.most
    ]
    heapq.heapify(queue)
    while queue:
        worth, number, allocation = queue[0]
        if worth > 0 or (worth == 0 and allocation.granted >= len(allocation.own)):
            allocation.denial = DenialReason.NO_SPEEDUP
            heapq.heappop(queue)
        elif not allocator.grow(allocation) or allocation.granted == allocation.most:
            heapq.heappop(queue)
        else:
            heapq.heapreplace(queue, (-allocation.worth(allocation.granted), number, allocation))


def _reason(allocation: Allocation, capacity: Mapping[str, float], resources: Sequence[str], pause_s: float) -> str:
    job, have, target = allocation.job, len(allocation.own), allocation.granted
    lack = _denial_text(allocation, capacity, resources)
    if not target:
        suspended = "is suspended, with a checkpoint" if job.resumes and job.students is None else "is suspended"
        return f"{suspended if job.runs else 'waits'}: {lack}"
    if target > have and not have:
        does = f"starts with {target}"
    elif target > have:
        does = f"grows from {have} to {'its minimum of ' if target == job.bounds.min else ''}{target}"
    else:
        does = f"shrinks from {have} to {target}" if target < have else f"stays at {have}"
    if job.limit and target == job.limit.instances:
        return f"{does}: {job.limit.reason}"
    if target > have:
        return does
    if target == job.bounds.max:
        return f"{does}, its maximum"
    if allocation.denial is DenialReason.NO_GAIN:
        return f"{does}: growing would not make up for a pause of {pause_s:g} s"
    return f"{does}: {lack}"


def _denial_text(allocation: Allocation, capacity: Mapping[str, float], resources: Sequence[str]) -> str:
    """Return in words what keeps a job from having more."""
    job = allocation.job
    if job.limit and job.most < job.bounds.min:
        return f"{job.limit.reason}, and its minimum is {job.bounds.min}"
    needs = {name: need * QUANTUM for name, need in zip(resources, allocation.size, strict=True) if need}
    if allocation.denial is DenialReason.CAPACITY and allocation.granted:
        whole = " and ".join(f"{capacity[name]:g} {name}" for name in needs if name in capacity)
        return f"this is its share of the {whole} that training may use"
    if allocation.denial is DenialReason.CAPACITY:
        for name, need in needs.items():
            if name in capacity and need * job.bounds.min > capacity[name]:
                least = f"its minimum of {job.bounds.min} needs {need * job.bounds.min:g} {name}"
                return f"{least}, training may use {capacity[name]:g}"
        return f"its minimum of {job.bounds.min} does not fit beside those that come first"
    if allocation.denial is DenialReason.ROOM:
        return f"no node has room for {'another' if allocation.granted else f'its minimum of {job.bounds.min}'}"
    return allocation.denial.value if allocation.denial else "it has what it asks for"
