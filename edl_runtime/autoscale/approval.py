"""Shrinks that wait for a person: jobs keep what they have until then, and others grow beside them.

What a person has answered holds for a while, and is kept in Redis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.autoscale.jobs import Job, Node, Target
from edl_runtime.autoscale.policies import Lasting, Policy, ask, beside
from edl_runtime.autoscale.policy import decide as default_policy
from edl_runtime.store import keys
from edl_runtime.store.client import unavailable_if_lost
from edl_runtime.store.records import decoded

if TYPE_CHECKING:
    from redis.asyncio import Redis


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether it was `approved` that a job or pool shrinks to so many instances, its `target`."""

    approved: bool
    target: int


class Approved:
    """A policy as another one, but that only approved jobs may lose instances that run, and none below its approval.

    - `answers`: by the job's name, what a person has said of it.
    - `waiting`: the names of those that would lose more if all were approved, the last time that it decided.

    The last instances of a job leave first, and so it keeps all up to the last one that runs. Who would have to shrink
    only because others keep what they have does not, and waits for nothing.
    """

    def __init__(self, answers: Mapping[str, Answer], policy: Policy = default_policy) -> None:
        self.waiting: frozenset[str] = frozenset()
        self._answers = dict(answers)
        self._policy = Lasting(policy)  # who can't be suspended does not wait for leave to be

    def __call__(
        self, jobs: Sequence[Job], nodes: Sequence[Node], capacity: Mapping[str, float], *, now_s: float, pause_s: float
    ) -> dict[str, Target]:
        """Decide as the policy does beside jobs that keep what they have."""
        kept: dict[str, Target] = {}
        due: Mapping[str, Target] = {}
        while True:
            others = [job for job in jobs if job.name not in kept]
            staying = [(job, kept[job.name].instances) for job in jobs if job.name in kept]
            targets = ask(self._policy, others, *beside(staying, nodes, capacity), now_s=now_s, pause_s=pause_s)
            due = due or targets
            shrinking = [job for job in others if targets[job.name].instances < self._least(job)]
            if not shrinking:
                self.waiting = frozenset(job.name for job in jobs if due[job.name].instances < self._least(job))
                return {job.name: kept.get(job.name) or targets[job.name] for job in jobs}
            kept |= {job.name: self._keeping(job, due[job.name]) for job in shrinking}

    def _least(self, job: Job) -> int:
        """Return the fewest instances that a job may have without another answer."""
        answer = self._answers.get(job.name)
        if not answer or not answer.approved:
            return job.up_to_the_last
        return min(job.up_to_the_last, job.without_stranded(answer.target))  # a person was shown all that it has

    def _keeping(self, job: Job, due: Target) -> Target:
        """Return the target of a job that may not shrink further; `due` is what it would be if all were approved.

        What waits for a place may go, but for its minimum.
        """
        least = self._least(job)
        instances = min(job.instances, max(least, job.bounds.min))
        shrinks = any(job.nodes[instances:])
        so_far = f"shrinks so far as was approved, to {instances}," if shrinks else f"stays at {instances}"
        answer = self._answers.get(job.name)
        if due.instances >= least:
            why = "beside others that may not shrink"
        elif answer and not answer.approved:
            why = f"as somebody has refused that it {due.reason}"
        else:
            why = f"until somebody approves that it {due.reason}"
        return Target(instances=instances, reason=f"{so_far} {why}", nodes=job.nodes[:instances])


async def keep_answer(
    client: Redis, namespace: str, job: str, answer: Answer, *, for_s: float, unless_kept: bool = False
) -> None:
    """Keep for so many seconds whether a job may shrink, `unless_kept` only where no answer is kept already.

    Raises RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        name, content = keys.shrink_answer(namespace, job), msgspec.json.encode(answer)
        await client.set(name, content, px=max(1, round(for_s * 1000)), nx=unless_kept)


async def kept_answer(client: Redis, namespace: str, job: str) -> Answer | None:
    """Return whether a job may shrink, None if nobody has said so lately, or what can't be read.

    Raises RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        kept = await client.get(keys.shrink_answer(namespace, job))
    return decoded(kept, Answer)
