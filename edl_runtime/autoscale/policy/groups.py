"""Groups: jobs that are admitted, suspended and resumed together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edl_runtime.autoscale.policy.model import Workload


class Group(msgspec.Struct, frozen=True):
    """A `job` and the `pools` that it asks, of which none works without the other; or a job or pool alone.

    A pool may be in several groups. It runs while one of them is admitted.
    """

    job: Workload
    pools: tuple[Workload, ...] = ()

    @property
    def members(self) -> tuple[Workload, ...]:
        """The job and its pools."""
        return (self.job, *self.pools)

    @property
    def least(self) -> int:
        """How many instances it has at least."""
        return sum(member.bounds.min for member in self.members)

    @property
    def is_allowed(self) -> bool:
        """Whether limits leave its members their minimums."""
        return all(member.most >= member.bounds.min for member in self.members)

    @property
    def is_unused_pool(self) -> bool:
        """Whether it is a pool that nobody asks."""
        return self.job.students == 0


def groups_of(jobs: Sequence[Workload]) -> list[Group]:
    """Return the groups: of each job with its pools, and of each pool that others use, or nobody."""
    pools = {job.name: job for job in jobs if job.students is not None}
    asked = {name for job in jobs for name in job.pools}
    return [
        Group(job, tuple(pools[name] for name in job.pools if name in pools))
        for job in jobs
        if job.students or job.name not in asked
    ]
