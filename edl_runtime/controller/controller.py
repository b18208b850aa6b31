"""The controller of one namespace: makes the Jobs of its `TrainingJob` objects, and writes their status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from edl_runtime.backends.errors import (
    ClusterError,
    ClusterUnavailableError,
    ConflictError,
    UnknownJobError,
)
from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.kubernetes.client import KubernetesClient, Manifest
from edl_runtime.backends.kubernetes.informer import resource_version
from edl_runtime.compat.job_specs import job_spec
from edl_runtime.controller.reconcile import Step, next_step
from edl_runtime.controller.redis_access import RedisAccess
from edl_runtime.controller.resource import FINALIZER, RECORDED, Resource
from edl_runtime.controller.status import (
    UNKNOWN_PACE,
    Event,
    Pace,
    Problem,
    event_manifest,
    events_of,
    events_of_start,
    progress_text,
    status_of,
)
from edl_runtime.controller.vitals import Vitals
from edl_runtime.errors import BackendError, EdlError, SpecError, UnexpectedError, isolated
from edl_runtime.log import get_logger
from edl_runtime.monitor.reports import JobReport, restarts, standstill, unknown_reports
from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from edl_runtime.backends.kubernetes.backend import KubernetesBackend

SETTLE_S = 0.2
"""How long changes are collected before they are looked at."""

RESYNC_S = 30.0
"""How often all objects are looked at without a change, and how long a refused step is not tried again."""

RETRY_S = 5.0
"""Delay before a step or watch that has failed is repeated."""

SPEC_CHANGED = "spec.trainer.instances was changed"
"""The reason of a resize to the size of a spec."""

EACH_INSTANCE_S = 0.001
"""How much less often an object is looked at for each instance: to look costs about 0.1 ms for each."""

PROGRESS_EVERY_S = 30.0
"""How often it is read how far trainings are: each change is a write of a status."""

NAMESPACE_EVERY_S = 10.0
"""How often to look whether the namespace is being deleted."""

STOP_LIMIT_S = 300.0
"""How long a deleted object waits for its trainers. Then it goes, and the cluster deletes what is left of the Job."""

log = get_logger(__name__)

clock = time.monotonic


class Refusal(msgspec.Struct, frozen=True):
    """A step that the cluster has refused. `tried`: the step, and what it was decided by."""

    tried: tuple[object, ...]
    at: float
    problem: Problem


class JobDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What all Jobs get: variables by `settings`, `redis_url` as pods reach it, and where `checkpoints` are kept."""

    settings: RuntimeSettings
    redis_url: str
    checkpoints: str = ""


class NamespaceController:
    """Reconciles the TrainingJobs of one namespace.

    `backend`: one of that namespace that `KubernetesBackend.following` yields. `read_reports`: returns what
    Redis knows of jobs, by name. `access`: to Redis, by a user of the namespace's own, whose login jobs get instead of
    that of `defaults.redis_url`; None for the same.
    """

    def __init__(
        self,
        api: KubernetesClient,
        backend: KubernetesBackend,
        defaults: JobDefaults,
        *,
        vitals: Vitals,
        read_reports: Callable[[Sequence[JobStatus]], Awaitable[Mapping[str, JobReport]]],
        access: RedisAccess | None = None,
    ) -> None:
        self._api = api
        self._backend = backend
        self._defaults = defaults
        self._vitals = vitals
        self._read_reports = read_reports
        self._paces: dict[str, tuple[float, Pace]] = {}  # by name, with when the job was made
        self._access = access
        self._objects: dict[str, Manifest] = {}
        self._due: dict[str, asyncio.Event] = {}
        self._refusals: dict[str, Refusal] = {}
        self._is_terminating = False

    async def run(self) -> None:
        """Reconcile until cancelled. What fails is logged and repeated."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_objects(tasks))
            tasks.create_task(self._follow_jobs(tasks))
            tasks.create_task(self._follow_namespace(tasks))
            tasks.create_task(self._follow_progress())

    async def _follow_namespace(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            before = self._is_terminating
            try:
                with isolated(f"namespace {self._api.namespace!r}"):
                    self._is_terminating = await self._api.is_terminating()
            except EdlError as error:
                self._log_failure("namespace.not_read", error)
            if self._is_terminating != before:
                log.info("namespace.changed", namespace=self._api.namespace, is_terminating=self._is_terminating)
                self._wake_all(tasks)
            await asyncio.sleep(NAMESPACE_EVERY_S)

    async def _follow_progress(self) -> None:
        """Read how far trainings are, and whether they stand still."""
        while True:
            jobs: Sequence[JobStatus] = ()
            pause_s = PROGRESS_EVERY_S
            try:
                with isolated("the progress of trainings"):
                    jobs = [job for job in await self._backend.list() if job.name in self._objects]
                    reports = await self._read_reports(jobs)
            except EdlError as error:
                self._log_failure("progress.not_read", error)
                reports = unknown_reports(jobs)
                pause_s = RETRY_S
            for job in jobs:
                try:
                    with isolated(f"the progress of {job.name!r}"):
                        self._note_pace(job, _pace(job, reports.get(job.name) or JobReport()))
                except EdlError as error:
                    self._log_failure("progress.unreadable", error, job=job.name)
            await asyncio.sleep(pause_s)

    def _note_pace(self, job: JobStatus, pace: Pace) -> None:
        """Keep it for the next look at the object; whether it stands still, and why, is written at once."""
        _, before = self._paces.get(job.name, (0.0, UNKNOWN_PACE))
        self._paces[job.name] = (job.created_at, pace)
        if (before.still and before.still.reason) != (pace.still and pace.still.reason) and job.name in self._due:
            self._due[job.name].set()

    async def _follow_objects(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            try:
                with isolated("the watch of TrainingJobs"):
                    async for found in self._api.watch("TrainingJob"):
                        self._objects = {name: self._newest(name, thing) for name, thing in found.items()}
                        self._wake_all(tasks)
            except EdlError as error:
                self._log_failure("trainingjobs.not_watched", error)
            await asyncio.sleep(RETRY_S)

    async def _follow_jobs(self, tasks: asyncio.TaskGroup) -> None:
        changes, pause_s = 0, SETTLE_S
        while True:
            try:
                with isolated("the watch of jobs"):
                    changes, pause_s = await self._next_change(changes), SETTLE_S
            except EdlError as error:
                self._log_failure("jobs.not_watched", error)
                pause_s = RETRY_S
            self._wake_all(tasks)
            await asyncio.sleep(pause_s)

    async def _next_change(self, changes: int) -> int:
        """Wait until jobs have changed, for RESYNC_S at most; return how often they have."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RESYNC_S):
                return await self._backend.wait_for_change(changes)
        return changes

    def _wake_all(self, tasks: asyncio.TaskGroup) -> None:
        for name in self._objects:
            if name not in self._due:
                self._due[name] = asyncio.Event()
                tasks.create_task(self._follow_object(name))
        for due in self._due.values():
            due.set()

    async def _follow_object(self, name: str) -> None:
        """Reconcile an object whenever something has changed, until it is gone. Others don't wait for its steps."""
        due = self._due[name]
        while name in self._objects:
            await due.wait()
            due.clear()
            pause_s = SETTLE_S
            try:
                with isolated(f"TrainingJob {name!r}"):
                    pause_s += EACH_INSTANCE_S * await self._reconcile(name)
            except ConflictError:  # somebody has changed it meanwhile
                await self._read_again(name)
                due.set()
            except EdlError as error:
                self._log_failure("trainingjob.step_failed", error, job=name)
                await asyncio.sleep(RETRY_S)
                due.set()
            await asyncio.sleep(pause_s)
        del self._due[name]
        self._refusals.pop(name, None)
        self._paces.pop(name, None)

    async def _reconcile(self, name: str) -> int:
        """Do one step after the other, and write the status. Return how many instances the job has."""
        problem = None
        while name in self._objects:
            resource, job = Resource(self._objects[name]), await self._job(name)
            step = None if problem else next_step(resource, job, in_terminating_namespace=self._is_terminating)
            if step is None or (step.action == "delete" and resource.is_deleting):  # it takes a while: say so first
                is_new = await self._write_status(resource, job, problem)
                if step is None and not is_new:
                    if job and job.is_suspended:
                        await self._backend.release(name)
                    return len(job.instances) if job else 0
                if is_new:
                    continue
            if step:
                problem = await self._try(step, resource, job)
        return 0

    async def _job(self, name: str) -> JobStatus | None:
        try:
            return await self._backend.get(name)
        except UnknownJobError:
            return None

    async def _try(self, step: Step, resource: Resource, job: JobStatus | None) -> Problem | None:
        """As `_do`, but what the cluster has just refused is not repeated: each time costs a dozen requests."""
        tried = (step, resource.uid, resource.generation, job.token if job else "")
        known = self._refusals.get(resource.name)
        if known and known.tried == tried and clock() < known.at + RESYNC_S:
            return known.problem
        problem = await self._do(step, resource, job)
        if problem and problem.reason == "Refused":
            self._refusals[resource.name] = Refusal(tried, clock(), problem)
        return problem

    async def _do(self, step: Step, resource: Resource, job: JobStatus | None) -> Problem | None:
        """Do the step; return why it can't be done. Raises ConflictError, and BackendError for what may pass."""
        match step.action:
            case "add-finalizer":
                await self._patch(resource, {"metadata": {"finalizers": [*resource.finalizers, FINALIZER]}})
            case "remove-finalizer":
                await self._remove_finalizer(resource)
            case "record-size":
                recorded = {RECORDED: str(resource.generation + 1)}  # `_patch` changes this version, or none
                spec = {"trainer": {"instances": step.size}}
                await self._patch(resource, {"metadata": {"annotations": recorded}, "spec": spec})
            case "delete":
                await self._delete(step.token, resource)
            case "submit" | "resize":
                try:
                    with isolated("the spec"):
                        if step.action == "submit":
                            await self._submit(resource, job)
                        else:
                            await self._backend.resize(resource.name, step.size, reason=SPEC_CHANGED)
                except (SpecError, UnexpectedError) as error:
                    return Problem("InvalidSpec", str(error))
                except (ClusterUnavailableError, ConflictError):
                    raise
                except BackendError as error:
                    return Problem("Refused", str(error))
        return None

    async def _submit(self, resource: Resource, job: JobStatus | None) -> None:
        training_job = resource.training_job(self._defaults.settings.manifest_volumes)
        spec = job_spec(training_job, self._defaults.settings, checkpoints=self._defaults.checkpoints)
        secrets = {"EDL_REDIS_URL": await self._access.grant() if self._access else self._defaults.redis_url}
        made = await self._backend.submit(spec, token=resource.token, secrets=secrets, owned_by=resource.manifest)
        for event in events_of_start(job, made, training_job.notes):
            await self._record(resource, event)

    async def _delete(self, token: str, resource: Resource) -> None:
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._backend.delete(resource.name, token=token)
        except TimeoutError:
            message = f"its Job has not ended within {STOP_LIMIT_S:.0f} s"
            await self._record(resource, Event("Warning", "StopTimedOut", message))
            if resource.is_deleting or self._is_terminating:
                await self._remove_finalizer(resource)

    async def _remove_finalizer(self, resource: Resource) -> None:
        others = [one for one in resource.finalizers if one != FINALIZER]
        await self._patch(resource, {"metadata": {"finalizers": others}})
        if not others:
            self._objects.pop(resource.name, None)

    async def _patch(self, resource: Resource, change: dict[str, Any]) -> None:
        """Change the object as it was read. Raises ConflictError if it has changed since."""
        version = {"resourceVersion": resource.manifest["metadata"]["resourceVersion"]}
        try:
            changed = await self._api.patch(
                resource.manifest, {**change, "metadata": {**change.get("metadata", {}), **version}}
            )
        except ClusterError as error:
            self._forget_if_gone(resource, error)
        else:
            self._objects[resource.name] = changed

    async def _write_status(self, resource: Resource, job: JobStatus | None, problem: Problem | None) -> bool:
        """Write the status and the events of its change; return whether it has changed."""
        made_at, pace = self._paces.get(resource.name, (0.0, UNKNOWN_PACE))
        of_this_run = pace if job and made_at == job.created_at else UNKNOWN_PACE
        status = status_of(resource, job, problem, time.time(), of_this_run)
        if all(resource.status.get(field) == value for field, value in status.items()):
            return False
        for event in events_of(resource, status, why=job.scaling.resized_for if job and job.scaling else ""):
            await self._record(resource, event)
        try:
            self._objects[resource.name] = await self._api.patch_status(resource.manifest, status)
        except ClusterError as error:
            self._forget_if_gone(resource, error)
        return True

    async def _record(self, resource: Resource, event: Event) -> None:
        """Make the Event, unless it was made before."""
        log.info("trainingjob.event", job=resource.name, reason=event.reason, message=event.message)
        try:
            await self._api.create(event_manifest(resource.manifest, event, time.time()))
        except ConflictError:
            pass
        except ClusterError as error:  # as in a namespace that is being deleted
            self._log_failure("trainingjob.event_refused", error, job=resource.name)

    def _forget_if_gone(self, resource: Resource, error: ClusterError) -> None:
        if error.status != 404:
            raise error
        self._objects.pop(resource.name, None)

    async def _read_again(self, name: str) -> None:
        try:
            with isolated(f"TrainingJob {name!r}"):
                found = await self._api.get("TrainingJob", name)
        except EdlError as error:
            self._log_failure("trainingjob.not_read", error, job=name)
            return
        if found:
            self._objects[name] = found
        else:
            self._objects.pop(name, None)

    def _newest(self, name: str, thing: Manifest) -> Manifest:
        """Return the object as the watch has it, or as our own last change has left it."""
        known = self._objects.get(name, thing)
        return max(thing, known, key=resource_version) if _uid(known) == _uid(thing) else thing

    def _log_failure(self, event: str, error: EdlError, **about: str) -> None:
        self._vitals.failures[event] += 1
        log.warning(event, namespace=self._api.namespace, cause=str(error), **about)


def _pace(job: JobStatus, report: JobReport) -> Pace:
    failing = restarts(report.group, report.progress) if report.group else ""
    return Pace(progress_text(report.progress) if report.progress else "", standstill(job, report), failing)


def _uid(thing: Manifest) -> str:
    return str(thing["metadata"]["uid"])
