"""Shrinks that wait for a person: jobs keep what they have until then, and others grow beside them.

What a person has answered holds for a while, and is kept in Redis.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from edl_runtime.autoscale.jobs import Job, Node, Target
from edl_runtime.autoscale.plan import Policy
from edl_runtime.autoscale.policy import decide as default_policy
from edl_runtime.store import keys
from edl_runtime.store.client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis


_YES, _NO = "yes", "no"


class Approved:
    """A policy as another one, but that only jobs of these names may lose instances that run.

    `waiting` are the names of those that would have, the last time that it decided.
    """

    def __init__(self, names: Collection[str], policy: Policy = default_policy) -> None:
        self.waiting: frozenset[str] = frozenset()
        self._names = frozenset(names)
        self._policy = policy

    def __call__(
        self, jobs: Sequence[Job], nodes: Sequence[Node], capacity: Mapping[str, float], *, now_s: float, pause_s: float
    ) -> dict[str, Target]:
        """Decide as the policy does beside jobs that keep what they have."""
        kept: dict[str, Target] = {}
        while True:
            others = [job for job in jobs if job.name not in kept]
            left = _beside([job for job in jobs if job.name in kept], capacity)
            targets = self._policy(others, nodes, left, now_s=now_s, pause_s=pause_s)
            shrinking = {
                job.name: _keeping(job, targets[job.name])
                for job in others
                if job.name not in self._names and targets[job.name].instances < _running(job)
            }
            if not shrinking:
                self.waiting = frozenset(kept)
                return {job.name: kept.get(job.name) or targets[job.name] for job in jobs}
            kept |= shrinking


def _running(job: Job) -> int:
    return sum(map(bool, job.nodes))


def _beside(kept: Sequence[Job], capacity: Mapping[str, float]) -> dict[str, float]:
    """Return what these jobs leave of a capacity."""
    reserved = {name: sum(job.resources.get(name, 0.0) * _running(job) for job in kept) for name in capacity}
    return {name: max(0.0, round(amount - reserved[name], 6)) for name, amount in capacity.items()}


def _keeping(job: Job, due: Target) -> Target:
    """Return the target of a job that would shrink: what runs of it, for what waits for a place may go."""
    instances = min(job.instances, max(_running(job), job.bounds.min))
    return Target(
        instances=instances,
        reason=f"stays at {instances} until somebody approves that it {due.reason}",
        nodes=job.nodes[:instances],
    )


async def keep_answer(client: Redis, namespace: str, job: str, *, approved: bool, for_s: float) -> None:
    """Keep for so many seconds whether a job may shrink. Raises RegistryUnavailableError."""
    with unavailable_if_lost(client):
        await client.set(keys.shrink_answer(namespace, job), _YES if approved else _NO, px=max(1, round(for_s * 1000)))


async def kept_answer(client: Redis, namespace: str, job: str) -> bool | None:
    """Return whether a job may shrink, None if nobody has said so lately. Raises RegistryUnavailableError."""
    with unavailable_if_lost(client):
        kept = await client.get(keys.shrink_answer(namespace, job))
    return None if kept is None else kept == _YES
