"""Changes of jobs and pools between two polls that call for a rescaling. Pure.

Polling finds changes by anyone, so no command has to report them. It misses only what does not last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from edl_runtime.backends.interface import InstanceStatus, JobStatus

ChangeKind = Literal["submitted", "ended", "pending"]


class JobChange(msgspec.Struct, frozen=True, kw_only=True):
    """A job or pool was submitted, has ended or was stopped, or has become pending: its minimum finds no room."""

    job: str
    what: ChangeKind


class JobMark(NamedTuple):
    """What is compared of a job. A later one of the same name has another `created_at`."""

    created_at: float
    needs_room: bool


JobsSeen: TypeAlias = Mapping[str, JobMark]
"""The jobs that have not ended, and the pools, by name."""


def jobs_seen(jobs: Iterable[JobStatus]) -> JobsSeen:
    """Return the marks of all jobs that may need room. A failed pool is one: in a cluster it is started again."""
    active = [job for job in jobs if job.kind == "pool" or not job.has_ended]
    return {job.name: JobMark(job.created_at, _needs_room(job)) for job in active}


def job_changes(before: JobsSeen, now: JobsSeen) -> list[JobChange]:
    """Return the changes, sorted by name. From an empty `before`, every job was submitted."""
    kinds = {name: _kind(before.get(name), now.get(name)) for name in sorted({*before, *now})}
    return [JobChange(job=name, what=kind) for name, kind in kinds.items() if kind]


def _kind(before: JobMark | None, now: JobMark | None) -> ChangeKind | None:
    if now is None:
        return "ended"
    if before is None or before.created_at != now.created_at:
        return "submitted"
    return "pending" if now.needs_room and not before.needs_room else None


def _needs_room(job: JobStatus) -> bool:
    """Whether fewer instances are placed than its minimum. A job in a queue waits for the queue, not for room."""
    if job.scaling is None or job.scaling.queue:
        return False
    return sum(map(_needs_no_room, job.instances)) < min(job.scaling.bounds.min, job.attainable)


def _needs_no_room(instance: InstanceStatus) -> bool:
    """Whether it is placed, or will not be again. One that exited is restarted, and is pending if it finds no room."""
    is_restarted = instance.exit_code is not None and not (instance.given_up or instance.disrupted)
    has_place = bool(instance.node) and not instance.leaving and instance.phase in ("pending", "running")
    return has_place or is_restarted or instance.phase == "succeeded"
