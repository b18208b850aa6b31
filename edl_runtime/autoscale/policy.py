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

from edl_runtime.autoscale.claims import Claim, Claims, Refusal
from edl_runtime.autoscale.jobs import SMALLEST, Job, Node, Speedup, Target
from edl_runtime.errors import SpecError

REST_S = 300.0
"""A job grows, or starts again, so long after it was resized last."""

PAYS_BACK_S = 900.0
"""Within so long what a job gains by growing is to make up for its pause,"""

PAYS_BACK_TIMES = 1.5
"""so many times."""

TURN_S = 600.0
"""For so long a job that has started is not suspended for another of its priority."""

PATIENCE_S = 14_400.0
"""Who has waited for so long goes before those of its priority that run."""


def decide(
    jobs: Sequence[Job], nodes: Sequence[Node], capacity: Mapping[str, float], *, now_s: float, pause_s: float
) -> dict[str, Target]:
    """Return the target of each job, by name in the order given.

    `capacity` is what all instances together may use, by resource; of others each node has what it has. `now_s` is by
    the clock of the jobs' times, and `pause_s` how long a resize stops a job. Instances on nodes that are not in
    `nodes` have no place. Raises SpecError for two jobs or nodes of one name, and for capacities below 0.
    """
    _check(jobs, nodes, capacity, pause_s)
    by_rank = sorted(jobs, key=lambda job: _rank(job, now_s))
    claims = Claims(by_rank, nodes, capacity)
    _admit(claims, now_s)
    _hold(claims, now_s, pause_s)
    _fill(claims)
    targets = {
        claim.job.name: Target(
            instances=claim.granted,
            reason=_reason(claim, capacity, claims.resources, pause_s),
            nodes=tuple(nodes[place].name for place in claim.places()),
        )
        for claim in claims.claims
    }
    return {job.name: targets[job.name] for job in jobs}


def _check(jobs: Sequence[Job], nodes: Sequence[Node], capacity: Mapping[str, float], pause_s: float) -> None:
    for field, names in (("jobs", [job.name for job in jobs]), ("nodes", [node.name for node in nodes])):
        if len(set(names)) < len(names):
            twice = next(name for number, name in enumerate(names) if name in names[:number])
            raise SpecError(field, twice, "a name for each: this is the name of two")
    for resource, amount in capacity.items():
        if not 0 <= amount < math.inf:
            raise SpecError(f"capacity[{resource!r}]", amount, "a number, 0 or more")
    if not 0 <= pause_s < math.inf:
        raise SpecError("pause_s", pause_s, "seconds, 0 or more")


def _rank(job: Job, now_s: float) -> tuple[int, int, float, bool, float, str]:
    """Return a key by which jobs are admitted, the least first. Between two passes who was admitted only moves up."""
    since_s = now_s - job.since_s
    if job.students:
        turn, order = -1, float(job.bounds.min)
    elif job.runs and 0 <= since_s < TURN_S:
        turn, order = 0, 0.0
    elif not job.runs and since_s >= PATIENCE_S:
        turn, order = 1, -since_s
    else:
        turn, order = 2, float(job.bounds.min)
    return -job.priority, turn, order, not job.runs, -job.submitted_s, job.name


def _admit(claims: Claims, now_s: float) -> None:
    for _, level in groupby(claims.claims, key=lambda claim: claim.job.priority):
        equals = list(level)
        saving = False
        for claim in equals:
            job = claim.job
            if not job.instances and not _rested(job, now_s):
                claim.refusal = Refusal.RESTS
            elif not job.runs and saving and claim.most >= claim.least:
                claim.refusal = Refusal.SAVED
            elif claims.admit(claim):
                continue
            if claim.refusal is Refusal.LIMIT:
                continue
            if not saving and not job.runs and now_s - job.since_s >= PATIENCE_S:
                saving = claims.would_fit(claim, equals)


def _rested(job: Job, now_s: float) -> bool:
    """Return whether it is long enough since a job was resized. A time that has not come yet is a clock that jumped."""
    return job.resized_s is None or not 0 <= now_s - job.resized_s < REST_S


def _hold(claims: Claims, now_s: float, pause_s: float) -> None:
    """Keep jobs from growing that were resized just now, or would not gain enough by it."""
    ideal: dict[Claim, int] | None = None
    for claim in claims.claims:
        have = len(claim.own)
        if not claim.granted or have < claim.least or have >= claim.most:
            continue
        if not _rested(claim.job, now_s):
            claim.most, claim.refusal = have, Refusal.RESTS
        elif claim.gain(have) > 0 and not _pays(claim.speedup, have, have + 1, pause_s):
            ideal = ideal or claims.ideal()
            if not _pays(claim.speedup, have, max(ideal[claim], have + 1), pause_s):
                claim.most, claim.refusal = have, Refusal.NO_GAIN


def _pays(speedup: Speedup, now: int, then: int, pause_s: float) -> bool:
    goodput = speedup.goodput(now)
    return (speedup.goodput(then) - goodput) * PAYS_BACK_S > PAYS_BACK_TIMES * pause_s * goodput


def _fill(claims: Claims) -> None:
    queue = [
        (-claim.worth(claim.granted), number, claim)
        for number, claim in enumerate(claims.claims)
        if 0 < claim.granted < claim.most
    ]
    heapq.heapify(queue)
    while queue:
        worth, number, claim = queue[0]
        if worth > 0 or (worth == 0 and claim.granted >= len(claim.own)):
            claim.refusal = Refusal.NO_FASTER
            heapq.heappop(queue)
        elif not claims.grow(claim) or claim.granted == claim.most:
            heapq.heappop(queue)
        else:
            heapq.heapreplace(queue, (-claim.worth(claim.granted), number, claim))


def _reason(claim: Claim, capacity: Mapping[str, float], resources: Sequence[str], pause_s: float) -> str:
    job, have, target = claim.job, len(claim.own), claim.granted
    lack = _lack(claim, capacity, resources)
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
    if claim.refusal is Refusal.NO_GAIN:
        return f"{does}: growing would not make up for a pause of {pause_s:g} s"
    return f"{does}: {lack}"


def _lack(claim: Claim, capacity: Mapping[str, float], resources: Sequence[str]) -> str:
    """Return in words what keeps a job from having more."""
    job = claim.job
    if job.limit and job.most < job.bounds.min:
        return f"{job.limit.reason}, and its minimum is {job.bounds.min}"
    needs = {name: need * SMALLEST for name, need in zip(resources, claim.size, strict=True) if need}
    if claim.refusal is Refusal.CAPACITY and claim.granted:
        whole = " and ".join(f"{capacity[name]:g} {name}" for name in needs if name in capacity)
        return f"this is its share of the {whole} that training may use"
    if claim.refusal is Refusal.CAPACITY:
        for name, need in needs.items():
            if name in capacity and need * job.bounds.min > capacity[name]:
                least = f"its minimum of {job.bounds.min} needs {need * job.bounds.min:g} {name}"
                return f"{least}, training may use {capacity[name]:g}"
        return f"its minimum of {job.bounds.min} does not fit beside those that come first"
    if claim.refusal is Refusal.ROOM:
        return f"no node has room for {'another' if claim.granted else f'its minimum of {job.bounds.min}'}"
    return claim.refusal.value if claim.refusal else "it has what it asks for"
