"""Decides the next step for a `TrainingJob`, from its object and its Job. Pure.

Steps are repeated until there is none, and each may be done twice, so a controller may be killed between any two.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from edl_runtime.backends.interface import JobStatus, token_owner
from edl_runtime.controller.resource import FINALIZER, Resource

Action = Literal["add-finalizer", "remove-finalizer", "submit", "delete", "resize", "record-size"]


class Step(msgspec.Struct, frozen=True):
    """One change of the cluster.

    - "submit": get or create the Job of the spec.
    - "delete": stop the Job that has `token`.
    - "resize": give the Job the `size` of the spec; "record-size": write the Job's `size` into the spec.
    """

    action: Action
    token: str = ""
    size: int = 0


def own_job(resource: Resource, job: JobStatus | None) -> JobStatus | None:
    """Return the job if it was made for this object, and not for another or an earlier one, or by a command."""
    return job if job and token_owner(job.token) == resource.owner else None


def next_step(resource: Resource, job: JobStatus | None, *, in_terminating_namespace: bool = False) -> Step | None:
    """Return the next step, None if there is nothing to do. `job`: the job of the object's name.

    A terminating namespace deletes pods before their Jobs, and keeps those pods that a Job would replace. So there an
    object's Job has to end although the object isn't deleted yet.
    """
    own = own_job(resource, job)
    if resource.is_deleting or in_terminating_namespace:
        return _step_to_end(resource, own)
    if resource.has_ended:
        return Step("delete", token=own.token) if own and _is_failed_and_runs(own) else None
    if FINALIZER not in resource.finalizers:
        return Step("add-finalizer")
    return _step_to_start(resource, job) if own is None else _step_to_spec(resource, own)


def _step_to_end(resource: Resource, own: JobStatus | None) -> Step | None:
    if FINALIZER not in resource.finalizers:
        return None
    return Step("delete", token=own.token) if own and not resource.is_orphaning else Step("remove-finalizer")


def _step_to_start(resource: Resource, other: JobStatus | None) -> Step | None:
    """Return the step to the first Job of the object. `other`: a job of its name that is not its own."""
    if resource.size == 0:
        return None
    return Step("delete", token=other.token) if other and other.has_ended else Step("submit")


def _step_to_spec(resource: Resource, own: JobStatus) -> Step | None:
    """Return the step after which the object's Job is as its spec says, if it has not ended.

    A suspended one is made anew when it resumes.
    """
    if own.has_ended:
        return None
    if resource.size != 0 and (own.starting or own.token != resource.token):
        return Step("submit")
    return _step_to_size(resource, own)


def _is_failed_and_runs(job: JobStatus) -> bool:
    """Whether instances of a failed job are left, as after too many evictions: nobody else ends them."""
    living = [one for one in job.instances if one.phase in ("pending", "running") and not one.leaving]
    return job.phase == "failed" and bool(living)


def _step_to_size(resource: Resource, job: JobStatus) -> Step | None:
    """Return the step after which spec and Job have one size.

    If both have changed, the spec's counts: a person set it. One that is not allowed is left for the status to report.
    """
    if resource.size == job.wanted:
        return None
    if resource.size is None or resource.is_size_applied:
        return Step("record-size", size=job.wanted)
    return Step("resize", size=resource.size) if is_allowed(resource.size, job) else None


def is_allowed(size: int, job: JobStatus) -> bool:
    """Whether the job may be resized to that. It may not while it is ending."""
    return job.scaling is not None and (size == 0 or size in job.scaling.bounds)
