"""What has become of jobs and pools between two looks, as far as it calls for a rescaling. Pure.

Whoever looks again and again hears of all of them, whoever has started or ended them, and misses only what does not
last. So nobody has to tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from edl_runtime.backends.interface import InstanceStatus, JobStatus

ChangeKind = Literal["submitted", "ended", "pending"]


class JobChange(msgspec.Struct, frozen=True, kw_only=True):
    """A job, or pool, was submitted, has ended or was stopped, or has become pending: it lacks room for its minimum."""

    job: str
    what: ChangeKind


class JobMark(NamedTuple):
    """What counts of a job at a look: a later one of the same name has another `created_at`."""

    created_at: float
    lacks_room: bool


JobsSeen: TypeAlias = Mapping[str, JobMark]
"""The jobs that have not ended, and the pools, by name."""


def jobs_seen(jobs: Iterable[JobStatus]) -> JobsSeen:
    """Return what counts of all that may want room. A pool that has failed does, for in a cluster it comes again."""
    going_on = [job for job in jobs if job.kind == "pool" or not job.has_ended]
    return {job.name: JobMark(job.created_at, _lacks_room(job)) for job in going_on}


def job_changes(before: JobsSeen, now: JobsSeen) -> list[JobChange]:
    """Return what is new, by the jobs' names; after an empty look all that there is."""
    said = {name: _what(before.get(name), now.get(name)) for name in sorted({*before, *now})}
    return [JobChange(job=name, what=what) for name, what in said.items() if what]


def _what(before: JobMark | None, now: JobMark | None) -> ChangeKind | None:
    if now is None:
        return "ended"
    if before is None or before.created_at != now.created_at:
        return "submitted"
    return "pending" if now.lacks_room and not before.lacks_room else None


def _lacks_room(job: JobStatus) -> bool:
    """Whether fewer instances have a place than it needs. One in a queue waits for that queue, and not for room."""
    if job.scaling is None or job.scaling.queue:
        return False
    return sum(map(_needs_no_room, job.instances)) < min(job.scaling.bounds.min, job.attainable)


def _needs_no_room(instance: InstanceStatus) -> bool:
    """Whether it has a place, or needs none. Who has ended by itself comes again, and lacks room if it finds none."""
    comes_again = instance.exit_code is not None and not (instance.given_up or instance.disrupted)
    has_place = bool(instance.node) and not instance.leaving and instance.phase in ("pending", "running")
    return has_place or comes_again or instance.phase == "succeeded"
