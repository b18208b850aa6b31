"""The interface of policies, and how one is asked. Pure."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from pkgutil import resolve_name
from typing import Protocol

import msgspec

from edl_runtime.autoscale.policy.model import Node, Target, Workload
from edl_runtime.errors import SpecError

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Policy(Protocol):
    """Returns the target of each of `jobs`, by name, as `edl_runtime.autoscale.policy.decide.decide` does.

    - `nodes`: where instances may be. Those on other nodes count as unplaced.
    - `capacity`: what all instances together may use, by resource; other resources are limited by the nodes alone.
    - `now_s`: by the clock of the jobs' times. `pause_s`: how long a resize stops a job.
    """

    def __call__(
        self,
        jobs: Sequence[Workload],
        nodes: Sequence[Node],
        capacity: Mapping[str, float],
        *,
        now_s: float,
        pause_s: float,
    ) -> Mapping[str, Target]: ...


def check_policy_name(name: object) -> None:
    """Raise SpecError unless the name has the form "package.module:function". Nothing is imported."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise SpecError("policy", name, "'package.module:function', as text")


def import_policy(name: str) -> Policy:
    """Import the policy "package.module:function". Raises SpecError if that fails or it is not callable."""
    check_policy_name(name)
    try:
        found: Policy = resolve_name(name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise SpecError("policy", name, f"'package.module:function' that can be imported: {error}") from error
    if not callable(found):
        raise SpecError("policy", name, "a function, as `edl_runtime.autoscale.policy.decide:decide`")
    return found


def policy_name(policy: Policy) -> str:
    """Return a policy's name as "module:function", empty for an object without one."""
    name = getattr(policy, "__qualname__", "")
    return f"{policy.__module__}:{name}" if name else ""


def _ask_policy(
    policy: Policy,
    jobs: Sequence[Workload],
    nodes: Sequence[Node],
    capacity: Mapping[str, float],
    *,
    now_s: float,
    pause_s: float,
) -> dict[str, Target]:
    """Return the targets of a policy, which may be a user's own, for these jobs.

    Raises SpecError for a job without a target, and for a target that is neither 0, nor within the job's bounds, nor
    what the job has.
    """
    answer: object = policy(jobs, nodes, capacity, now_s=now_s, pause_s=pause_s)
    if not isinstance(answer, Mapping):
        raise SpecError("policy", f"{answer!r} as its answer", "a Target for each job, by its name")
    for job in jobs:
        target = answer.get(job.name)
        if not isinstance(target, Target) or not isinstance(target.instances, int) or target.instances < 0:
            raise SpecError("policy", f"{target!r} for {job.name!r}", "a Target with a number of instances, 0 or more")
        if target.instances not in (0, job.instances) and target.instances not in job.bounds:
            allowed = f"0, or {job.bounds.min} to {job.bounds.max}"
            raise SpecError("policy", f"{target.instances} instances for {job.name!r}", allowed)
    return {job.name: answer[job.name] for job in jobs}


def _left_beside(
    kept: Sequence[tuple[Workload, int]], nodes: Sequence[Node], capacity: Mapping[str, float]
) -> tuple[list[Node], dict[str, float]]:
    """Return the nodes and the capacity beside jobs that keep so many instances.

    The nodes include what the jobs' further instances free.
    """
    free = {node.name: dict(node.free) for node in nodes}
    for job, count in kept:
        for place in filter(free.__contains__, job.nodes[count:]):
            for name in free[place].keys() & job.resources.keys():
                free[place][name] = round(free[place][name] + job.resources[name], 6)
    reserved = {name: sum(job.resources.get(name, 0.0) * count for job, count in kept) for name in capacity}
    left = {name: max(0.0, round(amount - reserved[name], 6)) for name, amount in capacity.items()}
    return [Node(name=name, free=much) for name, much in free.items()], left


def protected_targets(
    policy: Policy,
    jobs: Sequence[Workload],
    nodes: Sequence[Node],
    capacity: Mapping[str, float],
    *,
    now_s: float,
    pause_s: float,
) -> dict[str, Target]:
    """Return the targets of a policy, but suspend no running job that would lose work.

    That is a job without checkpoints (see `Workload.resumes`), and a pool whose students stay: they would hold their
    GPUs and wait for it. Such a job keeps its minimum, and the policy decides again about the others.
    """
    kept: dict[str, Target] = {}
    while True:
        others = _without(jobs, kept)
        staying = [(job, kept[job.name].instances) for job in jobs if job.name in kept]
        targets = _ask_policy(policy, others, *_left_beside(staying, nodes, capacity), now_s=now_s, pause_s=pause_s)
        used = {pool for job in others if targets[job.name].instances for pool in job.pools}
        used |= {job.name for job in others if job.students}
        lost = [job for job in others if job.runs and not targets[job.name].instances]
        lost = [job for job in lost if job.name in used or not job.resumes]
        if not lost:
            return {**targets, **kept}
        kept |= {job.name: _minimum_of(job, targets[job.name]) for job in lost}


def _without(jobs: Sequence[Workload], kept: Container[str]) -> list[Workload]:
    """Return the jobs that are not kept. Those that are use their pools."""
    used = {pool for job in jobs if job.name in kept for pool in job.pools}
    return [
        msgspec.structs.replace(job, students=job.students + 1)
        if job.students is not None and job.name in used
        else job
        for job in jobs
        if job.name not in kept
    ]


def _minimum_of(job: Workload, due: Target) -> Target:
    """Return the smallest target that keeps one placed instance; the highest indexes leave first."""
    placed = [index for index, node in enumerate(job.nodes, start=1) if node]
    count = max(job.bounds.min, placed[: job.bounds.min][-1])
    since = "it has no checkpoint to resume from" if job.students is None else "students use it"
    why = f"keeps {count}, because {since}; otherwise it {due.reason}"
    return Target(instances=count, reason=why, nodes=job.nodes[:count])
