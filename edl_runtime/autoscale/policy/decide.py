"""The default policy: a pure function of jobs, nodes, capacity and the cost of a pause.

1. *Admit.* Groups get their minimums, highest priority first; see `edl_runtime.autoscale.policy.groups.Group`. Within a
   priority, in this order: pools that others use, who hold GPUs and idle without teachers; jobs that started within
   MIN_RUN_S; jobs that have waited for STARVATION_S, longest first; then the smallest minimum, so that most jobs run;
   then running ones; then the youngest, because an old job is likely to last (least attained service, as in Tiresias,
   Gu et al., NSDI 2019); and last those that were suspended within RESIZE_COOLDOWN_S. A running group that is not
   admitted is suspended, with a checkpoint. No other job of its priority starts while a starving one could run if the
   others were suspended, so only higher priorities and what is never suspended can starve a job. Behind all of them
   comes a pool that nobody has used for MIN_RUN_S.
2. *Fill.* Instances go one by one to the job where they are worth most: the gain in weighted log-goodput per share of
   the cluster. The sum of logs is largest when shares are fair (Nash welfare; goodput as in Pollux, Qiao et al., OSDI
   2021). Jobs without measurements count as scaling nearly perfectly, which makes it max-min.
3. *Hold.* An instance that a job has is worth more than a new one. A job grows only if that makes up for the pause, and
   during a cooldown only into what nobody else wants. What somebody has resized by hand does not grow then at all.
4. *Pack.* Each instance needs a node with room for it: best fit. Instances stay where they are, and the highest indexes
   leave first.

All quantities are whole thousandths, so rounding changes nothing and the same input gives the same answer. Applied at
once and called again, the policy changes nothing, because a granted job only moves up in both orders. But who has lost
its place to another may start elsewhere, as it could not while it was there.

`benchmarks/policy.py` measures it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from edl_runtime.autoscale.policy.allocation import Allocation, Allocator, DenialReason
from edl_runtime.autoscale.policy.groups import Group, groups_of
from edl_runtime.autoscale.policy.model import QUANTUM, Node, Speedup, Target, Workload, milli_needed
from edl_runtime.pods import format_amount

RESIZE_COOLDOWN_S = 300.0
"""For this long after its last resize a job takes no room from others to grow, and comes last to start again."""

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
    groups = sorted(groups_of(jobs), key=lambda group: _rank(group, now_s))
    allocator = Allocator(groups, nodes, capacity)
    _admit(allocator, groups, now_s)
    resting = _hold(allocator, now_s, pause_s)
    _fill(allocator, allocator.allocations)
    unchanged = [allocation for allocation in resting if allocation.granted == allocation.most]
    for allocation in unchanged:
        allocation.most = allocation.job.most
    _fill(allocator, unchanged)
    leading = {group.job.name: group for group in groups}
    targets = {
        allocation.job.name: Target(
            instances=allocation.granted,
            reason=_reason(allocation, leading, capacity, allocator.resources, pause_s),
            nodes=tuple(nodes[place].name for place in allocation.places()),
        )
        for allocation in allocator.allocations
    }
    return {job.name: targets[job.name] for job in jobs}


def _rank(group: Group, now_s: float) -> tuple[bool, int, int, float, bool, float, str]:
    """Return the sort key of admission, lowest first. Until the next pass, an admitted group only moves up."""
    job = group.job
    since_s = now_s - job.since_s
    turn, order = 2, float(group.least)
    if job.students:
        turn = -1
    elif job.runs and 0 <= since_s < MIN_RUN_S:
        turn, order = 0, 0.0
    elif not job.runs and since_s >= STARVATION_S:
        turn, order = 1, -since_s
    elif not job.instances and not _cooled_down(job, now_s):
        turn = 3
    yields = group.is_unused_pool and turn > 1 and (job.runs or job.changed_s is not None)
    return yields, -job.priority, turn, order, not job.runs, -job.submitted_s, job.name


def _admit(allocator: Allocator, groups: Sequence[Group], now_s: float) -> None:
    for _, level in groupby(groups, key=lambda group: _rank(group, now_s)[:2]):
        equals = list(level)
        saving = False
        for group in equals:
            job = group.job
            if not job.instances and _is_held(job, now_s):
                allocator.deny(group, DenialReason.BY_HAND)
            elif not job.runs and saving and group.is_allowed:
                allocator.deny(group, DenialReason.RESERVED)
            elif allocator.admit(group) or not group.is_allowed:
                continue
            elif not saving and not job.runs and now_s - job.since_s >= STARVATION_S:
                saving = allocator.would_fit(group, _may_end(equals, groups))


def _may_end(equals: Sequence[Group], groups: Sequence[Group]) -> set[str]:
    """Return the names of those of `equals` that are suspended when their turn is over."""
    ending = {group.job.name for group in equals if group.job.resumes and not group.job.students}
    staying = {member.name for group in groups if group.job.name not in ending for member in group.members}
    return {member.name for group in equals for member in group.members} - staying


def _cooled_down(job: Workload, now_s: float) -> bool:
    """Return whether the cooldown is over. A resize in the future means that a clock jumped, and does not count."""
    return job.resized_s is None or not 0 <= now_s - job.resized_s < RESIZE_COOLDOWN_S


def _is_held(job: Workload, now_s: float) -> bool:
    """Return whether it does not grow, since somebody wants it as it is."""
    return job.by_hand and not _cooled_down(job, now_s)


def _hold(allocator: Allocator, now_s: float, pause_s: float) -> list[Allocation]:
    """Keep jobs from growing where it would not make up for the pause, and during the cooldown; return the latter."""
    ideal: dict[Allocation, int] | None = None
    resting = []
    for allocation in allocator.allocations:
        have = len(allocation.own)
        if not allocation.granted or have < allocation.least or have >= allocation.most:
            continue
        if allocation.gain(have) > 0 and not _pays_back(allocation.speedup, have, have + 1, pause_s):
            ideal = ideal or allocator.ideal()
            if not _pays_back(allocation.speedup, have, max(ideal[allocation], have + 1), pause_s):
                allocation.most, allocation.denial = have, DenialReason.NO_GAIN
                continue
        if _is_held(allocation.job, now_s):
            allocation.most, allocation.denial = have, DenialReason.BY_HAND
        elif not _cooled_down(allocation.job, now_s):
            allocation.most = have
            resting.append(allocation)
    return resting


def _pays_back(speedup: Speedup, now: int, then: int, pause_s: float) -> bool:
    goodput = speedup.goodput(now)
    return (speedup.goodput(then) - goodput) * PAYBACK_WINDOW_S > PAYBACK_FACTOR * pause_s * goodput


def _fill(allocator: Allocator, allocations: Sequence[Allocation]) -> None:
    queue = [
        (-allocation.worth(allocation.granted), number, allocation)
        for number, allocation in enumerate(allocations)
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


def _reason(
    allocation: Allocation,
    leading: Mapping[str, Group],
    capacity: Mapping[str, float],
    resources: Sequence[str],
    pause_s: float,
) -> str:
    job, have, target = allocation.job, len(allocation.own), allocation.granted
    if not target:
        suspended = "is suspended, with a checkpoint" if job.resumes and job.students is None else "is suspended"
        why = _denial_text(leading.get(job.name, Group(job)), allocation.denial, capacity)
        return f"{suspended if job.runs else 'waits'}: {why}"
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
    return f"{does}: {_share_text(allocation, capacity, resources)}"


def _share_text(allocation: Allocation, capacity: Mapping[str, float], resources: Sequence[str]) -> str:
    """Return why a job that is admitted has no more instances."""
    if allocation.denial is DenialReason.CAPACITY:
        needs = [name for name, need in zip(resources, allocation.size, strict=True) if need]
        whole = " and ".join(f"{format_amount(capacity[name], name)} {name}" for name in needs if name in capacity)
        return f"this is its share of the {whole} that training may use"
    if allocation.denial is DenialReason.ROOM:
        return "no node has room for another"
    return allocation.denial.value if allocation.denial else "it has what it asks for"


def _denial_text(group: Group, denial: DenialReason | None, capacity: Mapping[str, float]) -> str:
    """Return why a group, or a pool without its students, is not admitted."""
    job = group.job
    for member in group.members:
        if member.limit and member.most < member.bounds.min:
            whose = "" if member is job else f"its pool {member.name!r}: "
            return f"{whose}{member.limit.reason}, and its minimum is {member.bounds.min}"
    least = f"its minimum of {job.bounds.min}"
    if group.pools:
        least = f"{least} with that of {' and '.join(repr(pool.name) for pool in group.pools)}"
    if denial is DenialReason.CAPACITY:
        for name in sorted({name for member in group.members for name in member.resources}):
            need = QUANTUM * sum(milli_needed(one.resources.get(name, 0)) * one.bounds.min for one in group.members)
            if need > capacity.get(name, math.inf):
                used = format_amount(capacity[name], name)
                return f"{least} needs {format_amount(need, name)} {name}, training may use {used}"
        return f"{least} does not fit beside those that come first"
    if denial is DenialReason.ROOM:
        return f"no node has room for {least}"
    return denial.value if denial else "it has what it asks for"
