"""The default policy: a pure function of jobs, nodes, capacity and the cost of a pause.

1. *Admit.* Jobs get their minimum, highest priority first. Within a priority, in this order: pools with students, who
   hold GPUs and idle without teachers; jobs that started within MIN_RUN_S; jobs that have waited for STARVATION_S,
   longest first; then the smallest minimum, so that most jobs run; then running ones; then the youngest, because an old
   job is likely to last (least attained service, as in Tiresias, Gu et al., NSDI 2019). A running job that is not
   admitted is suspended, with a checkpoint. No other job of its priority starts while a starving one could run if the
   others ended, so only higher priorities and pools can starve a job.
2. *Fill.* Instances go one by one to the job where they are worth most: the gain in weighted log-goodput per share of
   the cluster. The sum of logs is largest when shares are fair (Nash welfare; goodput as in Pollux, Qiao et al., OSDI
   2021). Jobs without measurements count as scaling nearly perfectly, which makes it max-min.
3. *Hold.* An instance that a job has is worth more than a new one. A job grows only after a cooldown, and if that makes
   up for the pause; a suspended job waits as long before it starts again.
4. *Pack.* Each instance needs a node with room for it: best fit. Instances stay where they are, and the highest indexes
   leave first.

All quantities are whole thousandths, so rounding changes nothing and the same input gives the same answer. Applied at
once and called again, the policy changes nothing, because a granted job only moves up in both orders.

`benchmarks/policy.py` measures it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import groupby

from edl_runtime.autoscale.policy.allocation import Allocation, Allocator, DenialReason
from edl_runtime.autoscale.policy.model import QUANTUM, Node, Speedup, Target, Workload

RESIZE_COOLDOWN_S = 300.0
"""A job grows, or starts again, only this long after its last resize."""

PAYBACK_WINDOW_S = 900.0
PAYBACK_FACTOR = 1.5
"""What a job gains by growing must make up for its pause this many times within the window."""

MIN_RUN_S = 600.0
"""A started job is not suspended for another of its priority before this time."""

STARVATION_S = 14_400.0
"""A job that has waited this long goes before running ones of its priority."""


def decide(
    jobs: Sequence[Workload], nodes: Sequence[Node], capacity: Mapping[str, float], *, now_s: float, pause_s: float
) -> dict[str, Target]:
    """Return the target of each job, by name in the order given; the arguments are those of `Policy`."""
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


def _rank(job: Workload, now_s: float) -> tuple[int, int, float, bool, float, str]:
    """Return the sort key of admission, lowest first. Until the next pass, an admitted job only moves up."""
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
                allocation.denial = DenialReason.COOLDOWN
            elif not job.runs and saving and allocation.most >= allocation.least:
                allocation.denial = DenialReason.RESERVED
            elif allocator.admit(allocation):
                continue
            if allocation.denial is DenialReason.LIMIT:
                continue
            if not saving and not job.runs and now_s - job.since_s >= STARVATION_S:
                saving = allocator.would_fit(allocation, equals)


def _cooled_down(job: Workload, now_s: float) -> bool:
    """Return whether the cooldown is over. A resize in the future means that a clock jumped, and does not count."""
    return job.resized_s is None or not 0 <= now_s - job.resized_s < RESIZE_COOLDOWN_S


def _hold(allocator: Allocator, now_s: float, pause_s: float) -> None:
    """Keep jobs from growing during the cooldown, or where it would not make up for the pause."""
    ideal: dict[Allocation, int] | None = None
    for allocation in allocator.allocations:
        have = len(allocation.own)
        if not allocation.granted or have < allocation.least or have >= allocation.most:
            continue
        if not _cooled_down(allocation.job, now_s):
            allocation.most, allocation.denial = have, DenialReason.COOLDOWN
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
    """Return why a job has no more instances."""
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
