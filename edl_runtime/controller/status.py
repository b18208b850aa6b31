"""The status of a `TrainingJob`, with its conditions and events. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.kubernetes import names
from edl_runtime.controller.reconcile import is_allowed, own_job
from edl_runtime.controller.resource import Resource
from edl_runtime.errors import counted
from edl_runtime.monitor.reports import Standstill
from edl_runtime.progress import Progress

LONGEST = 1000
"""Characters of a message: the API server allows 1,024 in an event."""


WHILE_RUNNING = ("Progressing", "Stopping")
"""Conditions that a training no longer has once it has ended."""


class Problem(NamedTuple):
    """Why the last step could not be done: a word for programs, as InvalidSpec, and a sentence for people."""

    reason: str
    message: str


class Event(NamedTuple):
    """An event. `type` is Normal or Warning."""

    type: str
    reason: str
    message: str


class Pace(NamedTuple):
    """How far a training is, in words, empty while unknown; and why it stands still, None if it is not known to.

    `failing`: why its workers have been restarted since its last new step, empty if none has.
    """

    progress: str = ""
    still: Standstill | None = None
    failing: str = ""


UNKNOWN_PACE = Pace()


def progress_text(report: Progress) -> str:
    """Return how far a training is: the share of all steps that is done, or the last step if that is unknown."""
    return f"step {report.step:,}"[:LONGEST] if report.share is None else f"{100 * report.share:.0f}%"


def status_of(
    resource: Resource, job: JobStatus | None, problem: Problem | None, now: float, pace: Pace = UNKNOWN_PACE
) -> dict[str, Any]:
    """Return the object's new status at a Unix time.

    - `phase`: creating, running, scaling, suspended, succeeded or failed; `reason`: what it waits for, or why.
    - `instances`: how many run; `wanted`: how many are requested; `selector`: of its pods, for `kubectl scale`.
    - `progress`: see `progress_text`; as before while it is not known.
    - `observedGeneration`: of the spec that was seen; `appliedGeneration`: of the last one whose size the Job has had.
    - `conditions`: Accepted, Running, Progressing once anything is known of it, and once true Stopping, Complete and
      Failed.
    """
    own, before = own_job(resource, job), resource.status
    running = sum(one.phase == "running" for one in own.instances) if own else 0
    problem = problem or _size_problem(resource, own)
    phase = _phase(resource, own, running)
    wanted = own.wanted if own else before.get("wanted") if resource.has_ended else resource.size
    applied = resource.generation if problem is None and resource.size == wanted else before.get("appliedGeneration")
    conditions = list(_conditions(resource, own, problem, phase, running))
    if not (own and running) or own.has_ended or resource.has_ended:
        pace = Pace(pace.progress)
    elif any(pace):
        conditions.append(_progressing(pace.still))
    return {
        "phase": phase,
        "reason": (_reason(resource, own, problem) or (pace.still.message if pace.still else pace.failing))[:LONGEST],
        "instances": running,
        **({} if wanted is None else {"wanted": wanted}),
        **({"progress": pace.progress} if own and pace.progress else {}),
        "selector": names.selector(resource.name),
        "observedGeneration": resource.generation,
        **({} if applied is None else {"appliedGeneration": applied}),
        "conditions": [_dated(one, before.get("conditions") or [], now) for one in conditions],
    }


def _size_problem(resource: Resource, job: JobStatus | None) -> Problem | None:
    size = resource.size
    if job is None or job.scaling is None or size is None or resource.is_size_applied:
        return None
    if size == job.wanted or is_allowed(size, job):
        return None
    bounds = job.scaling.bounds
    message = f"spec.trainer.instances: got {size}, allowed is {bounds.min} to {bounds.max}, or 0 to suspend"
    return Problem("InvalidSize", f"{message}; the job keeps {job.wanted}")


def _phase(resource: Resource, job: JobStatus | None, running: int) -> str:
    before = str(resource.status.get("phase") or "")
    is_stopping = resource.is_deleting and before  # that is neither success nor failure
    if resource.has_ended or is_stopping:
        return before
    if job is None:
        return "suspended" if resource.size == 0 else "creating"
    if job.has_ended:
        return job.phase
    if job.is_suspended:
        return "suspended"
    if running == job.wanted:
        return "running"
    return "creating" if before in ("", "creating") else "scaling"


def _reason(resource: Resource, job: JobStatus | None, problem: Problem | None) -> str:
    if resource.has_ended:
        return str(resource.status.get("reason") or "")
    if resource.is_deleting:
        return _stopping(job)
    return problem.message if problem else job.why if job else ""


def _stopping(job: JobStatus | None) -> str:
    left = len(job.instances) if job else 0
    return f"stopping: waits for {counted(left, 'instance')} to write a last checkpoint and end" if left else "stopping"


def _conditions(
    resource: Resource, job: JobStatus | None, problem: Problem | None, phase: str, running: int
) -> Iterator[dict[str, Any]]:
    if resource.has_ended:  # its Job may be gone
        yield from (one for one in resource.status.get("conditions") or [] if one["type"] not in WHILE_RUNNING)
    else:
        yield _condition("Accepted", problem is None, *(problem or ("Accepted", "")))
        least = job.scaling.bounds.min if job and job.scaling else 1
        runs = job is not None and not job.has_ended and running >= least
        wanted = job.wanted if job else 0
        reason = phase.capitalize() if phase in ("suspended", "succeeded", "failed") else "Instances"
        yield _condition("Running", runs, reason, f"{running} of {wanted} instances run")
        if phase in ("succeeded", "failed"):
            kind = "Complete" if phase == "succeeded" else "Failed"
            yield _condition(kind, True, phase.capitalize(), job.why if job else "")
    if resource.is_deleting:
        yield _condition("Stopping", True, "Deleted", _stopping(job))


def _progressing(still: Standstill | None) -> dict[str, Any]:
    if still is None:
        return _condition("Progressing", True, "Steps", "its trainers make steps")
    return _condition("Progressing", False if still.reason == "NoStep" else "Unknown", *still)


def _condition(kind: str, holds: bool | Literal["Unknown"], reason: str, message: str) -> dict[str, Any]:  # noqa: FBT001
    return {"type": kind, "status": str(holds), "reason": reason, "message": message[:LONGEST]}


def _dated(condition: dict[str, Any], before: list[dict[str, Any]], now: float) -> dict[str, Any]:
    """Return the condition with the time of its last transition."""
    kind = (condition["type"], condition["status"])
    same = next((one for one in before if (one["type"], one["status"]) == kind), None)
    return {**condition, "lastTransitionTime": same["lastTransitionTime"] if same else timestamp(now)}


def timestamp(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def events_of(resource: Resource, status: dict[str, Any], *, why: str = "") -> Iterator[Event]:
    """Yield the events of the change to this status. `why`: the reason of a new size, if known."""
    before = resource.status
    phase, size = status["phase"], status.get("wanted")
    old = before.get("wanted")
    if old is not None and size not in (None, old):
        yield Event("Normal", "Resized", f"resized from {old} to {size}" + (f": {why}" if why else ""))
    if phase != before.get("phase"):
        if phase == "succeeded":
            yield Event("Normal", "Completed", "the training has succeeded")
        elif phase == "failed":
            yield Event("Warning", "Failed", status["reason"] or "the training has failed")
    known = {one["type"]: one for one in before.get("conditions") or []}
    for one in status["conditions"]:
        is_new = one["message"] != known.get(one["type"], {}).get("message")
        if one["type"] == "Accepted" and one["status"] == "False" and is_new:
            yield Event("Warning", one["reason"], one["message"])
        if one["type"] == "Stopping" and one["type"] not in known:
            yield Event("Normal", "Stopping", one["message"])


def events_of_start(before: JobStatus | None, made: JobStatus, notes: Sequence[str]) -> Iterator[Event]:
    """Yield the events of a submit. `before`: the job of that name until then. `notes`: on the manifest."""
    if before is None or before.starting:
        yield Event("Normal", "Created", f"created a Job of {counted(made.wanted, 'instance')}")
    elif before.created_at != made.created_at:
        message = (
            f"the spec has changed: the training was stopped and continues with {counted(made.wanted, 'instance')}"
        )
        yield Event("Normal", "Restarted", message)
    else:
        return
    yield from (Event("Normal", "ManifestNote", note) for note in notes)


def event_manifest(about: dict[str, Any], event: Event, now: float) -> dict[str, Any]:
    """Return the Event of an object. Its name is that of its content, so that it is made once."""
    metadata = about["metadata"]
    content = "\n".join((metadata["uid"], str(metadata.get("generation")), *event))
    at = timestamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:LONGEST],
        "source": {"component": "edl-controller"},
        "reportingComponent": "edl-controller",
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
