"""What Redis knows of jobs, and whether a training that runs stands still, and why."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from edl_runtime.autoscale.history import running_count
from edl_runtime.backends.interface import JobStatus
from edl_runtime.concurrency import all_completed
from edl_runtime.elastic.rendezvous.group_status import GroupStatus, group_statuses
from edl_runtime.errors import counted
from edl_runtime.orphans import Orphan, read_notes
from edl_runtime.progress import Progress, progress_of_run, read_each_progress
from edl_runtime.store.errors import MalformedRecordError

if TYPE_CHECKING:
    from redis.asyncio import Redis

TRAINS_S = 10.0
"""A job with a report of the last so many seconds trains."""

STILL_AFTER_S = 60.0
STILL_AFTER_STEPS = 5
"""A training stands still after so many seconds without a step, or so many times its usual step if that is longer."""

SILENT_AFTER_S = 30.0
"""Agents send several heartbeats a second: after so many seconds without one they can't."""

UNKNOWN = "progress is unknown: Redis can't be used"


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis knows of a job: its progress, and the group of its elastic trainers. `problem`: what can't be read.

    `orphan`: the note that its task has left it, or None. `read_at`: Unix time, 0 if Redis was not read.
    """

    progress: Progress | None = None
    group: GroupStatus | None = None
    orphan: Orphan | None = None
    problem: str = ""
    read_at: float = 0.0


async def read_reports(client: Redis, namespace: str, jobs: Sequence[JobStatus]) -> dict[str, JobReport]:
    """Return what Redis knows of these jobs, by name, in the same few round trips for one or all.

    Reports of an earlier run of a job are left out. Raises RegistryUnavailableError.
    """
    elastic = [job.name for job in jobs if job.elastic]
    progresses, groups, orphans = await all_completed(
        read_each_progress(client, namespace, [job.name for job in jobs]),
        group_statuses(client, namespace, elastic),
        read_notes(client, namespace, jobs),
    )
    found, read_at = {}, time.time()
    for job in jobs:
        progress, group = progresses.get(job.name), groups.get(job.name)
        problems = [str(one) for one in (progress, group) if isinstance(one, MalformedRecordError)]
        progress = None if isinstance(progress, MalformedRecordError) else progress_of_run(progress, job.created_at)
        group = None if isinstance(group, MalformedRecordError) else group
        is_of_run = group is not None and group.heard_at >= job.created_at
        found[job.name] = JobReport(
            progress=progress,
            group=group if is_of_run else None,
            orphan=orphans.get(job.name),
            problem="; ".join(problems),
            read_at=read_at,
        )
    return found


def unknown_reports(jobs: Sequence[JobStatus]) -> dict[str, JobReport]:
    """Return the reports of these jobs while Redis can't be used."""
    return {job.name: JobReport(problem=UNKNOWN) for job in jobs if job.kind == "trainer" and not job.has_ended}


class Standstill(NamedTuple):
    """Why a training that runs makes no step, in a word for programs and in a sentence for people.

    "NoStep": its trainers say so. It may train if it is "NotHeard", as Redis has no news of it, or "Unreadable" there.
    """

    reason: Literal["NoStep", "NotHeard", "Unreadable"]
    message: str


def standstill(job: JobStatus, report: JobReport) -> Standstill | None:
    """Return why this training makes no step, as far as is known; None while it trains, and for what does not run.

    Plain scripts report no steps.
    """
    if job.kind != "trainer" or job.has_ended or not running_count(job):
        return None
    if report.problem:
        return Standstill("Unreadable", report.problem)
    if report.group is None:
        return _unheard(job, report.read_at)
    return None if report.group.outcome else _standstill(report.group, report.progress)


def _unheard(job: JobStatus, read_at: float) -> Standstill | None:
    """Return that nothing was ever heard of an elastic training whose agents have run for long enough to tell."""
    runs_s = read_at - min(one.started_at for one in job.instances if one.phase == "running")
    if not job.elastic or runs_s < STILL_AFTER_S:
        return None
    cause = "its instances can't reach Redis, don't trust its certificate, or have another EDL_NAMESPACE"
    return Standstill("NotHeard", f"no report in {format_duration(runs_s)}: {cause}; see `edl logs {job.name}`")


def _standstill(group: GroupStatus, progress: Progress | None) -> Standstill | None:
    silent_s = group.read_at - group.heard_at
    if silent_s >= SILENT_AFTER_S:
        cause = "its instances can't reach Redis, or are stopped"
        return Standstill("NotHeard", f"no report for {format_duration(silent_s)}: {cause}")
    waits = _waits(group, progress)
    if progress is None:
        return Standstill("NoStep", f"no step so far: {waits}") if waits else None
    idle_s = group.read_at - progress.updated_at
    if idle_s < max(STILL_AFTER_S, STILL_AFTER_STEPS * progress.step_s):
        return None
    return Standstill("NoStep", f"no step for {format_duration(idle_s)}{f': {waits}' if waits else ''}")


def group_trouble(job: JobStatus, report: JobReport) -> str:
    """Return what a training that does not stand still waits for, or why it ends; else only who is slow."""
    group, progress = report.group, report.progress
    if job.has_ended or group is None or group.outcome:
        return ""
    trains = bool(group.members) and progress is not None and progress.updated_at >= group.heard_at - TRAINS_S
    if trains and group.stop is None:
        return restarts(group, progress) or _slowness(group.stragglers)
    return _waits(group, progress)


def restarts(group: GroupStatus, progress: Progress | None) -> str:
    """Return why workers had to be restarted since the job's last new step, and how often; empty if none had."""
    last = group.failure
    if last is None or not last.reason or group.outcome or (progress and progress.step > last.step):
        return ""
    times, why = counted(last.count, "time"), last.reason.splitlines()[0]
    return f"instance {last.instance}: {why}; restarted {times} without progress since step {last.step:,}"


def _waits(group: GroupStatus, progress: Progress | None) -> str:
    if group.stop is not None:
        return f"ends with a checkpoint: {group.stop}"
    return restarts(group, progress) or (f"generation {group.generation} forms" if group.forming else group.waits)


def _slowness(stragglers: Mapping[int, float]) -> str:
    """Return which instances hold the others up, empty for none."""
    slow = [f"instance {index} computes {times:.1f} times as long" for index, times in sorted(stragglers.items())]
    return f"{' and '.join(slow)} as its peers" if slow else ""


def format_duration(seconds: float) -> str:
    """Return for example "3h 12m"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s"))
    first = next((place for place, (number, _) in enumerate(parts) if number), 3)
    return " ".join(f"{number}{unit}" for number, unit in parts[first : first + 2])
