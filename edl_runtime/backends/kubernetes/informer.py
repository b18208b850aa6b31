"""A cache of the jobs in a namespace, kept up to date by one watch for each kind of object.

Watches of different kinds are not ordered: the end of a Job may arrive before that of its pods. So when a Job's
conditions change, its status is returned when the watch of its pods has reached the resourceVersion of that change; if
it has not yet, the job's pods are listed once, to know what the watch has to report first.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.backends.errors import ClusterError, ClusterUnavailableError, UnknownJobError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.client import (
    MAX_OUTAGE_S,
    UNREADABLE,
    KubernetesClient,
    Manifest,
    Outage,
    Read,
    WatchEvent,
    open_client,
    read_whole,
)
from edl_runtime.backends.kubernetes.job_status import (
    is_queued,
    job_status,
    lacks_pods,
    refusals,
    true_conditions,
    unreadable_status,
)
from edl_runtime.backends.kubernetes.kept_fields import read_owner, read_pod_of_job, read_workload
from edl_runtime.backends.kubernetes.pod_status import (
    POD_EVENT_SELECTOR,
    is_creating_containers,
    is_pod_of,
    start_delays,
)
from edl_runtime.backends.kubernetes.workload_status import uid_of_queued
from edl_runtime.concurrency import all_completed
from edl_runtime.errors import BackendError, SpecError, UnexpectedError, isolated

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

IDLE_TIMEOUT_S = 300.0
"""Seconds without use after which watches are closed: passes that repeat keep them."""

SILENCE_REPORTED_S = 5.0
"""How long the API server may be unreachable before statuses report it."""

RETRY_AFTER_S = 5.0
"""Delay before a list or watch that the server has refused is repeated."""

REFUSED_AGAIN_S = 30.0
"""Delay before a watch is tried again for which there is no right, and without which the cache does."""

BATCH_SIZE = 32
"""Jobs whose statuses are computed at a time, some milliseconds, so that other tasks of the event loop run."""

clock = time.monotonic


class Indexer:
    """The objects of one kind that a watch has reported, by subject.

    `labels`, `fields`: selectors of the objects to watch, of all namespaces if `everywhere`. `subject_of`: returns the
    subject of an object. `read`: returns what is kept of one, with its metadata's name, namespace, uid and
    resourceVersion. `is_optional`: without the right to watch it, or such a kind, the cache is complete, and `refused`
    is the error; without `is_retried` also while the server does not answer for this kind alone.
    """

    def __init__(
        self,
        kind: str,
        subject_of: Callable[[Manifest], str],
        *,
        labels: str = "",
        fields: str = "",
        read: Read = read_whole,
        everywhere: bool = False,
        is_optional: bool = False,
        is_retried: bool = True,
    ) -> None:
        self.kind = kind
        self.labels = labels
        self.fields = fields
        self.read = read
        self.everywhere = everywhere
        self.is_optional = is_optional
        self.is_retried = is_retried
        self.error: BackendError | None = None
        self._subject_of = subject_of
        self.clear()

    def clear(self) -> None:
        self.is_known = False
        self.error = None
        self.refused: BackendError | None = None
        self._objects: dict[tuple[str, str], Manifest] = {}
        self._by_subject: dict[str, dict[tuple[str, str], Manifest]] = defaultdict(dict)
        self._version = 0
        self._is_open = False
        self._heard_at = clock()

    def of(self, subject: str) -> list[Manifest]:
        return list(self._by_subject.get(subject, {}).values())

    @property
    def all(self) -> Iterable[Manifest]:
        return self._objects.values()

    @property
    def subjects(self) -> Iterable[str]:
        return self._by_subject.keys()

    def apply(self, change: WatchEvent) -> set[str]:
        """Apply a change, and return the subjects whose objects have changed."""
        subjects: set[str] = set()
        self._heard_at = clock()
        self._version = int(change.version)
        self._is_open = change.type not in ("LISTED", "CLOSED")
        if change.type == "LISTED":
            self.is_known = True
            self.error = self.refused = None
            subjects.update(self._by_subject)
            self._objects.clear()
            self._by_subject.clear()
        for thing in change.objects:
            key = (thing["metadata"].get("namespace", ""), thing["metadata"]["name"])
            if before := self._objects.pop(key, None):
                subjects.add(self._subject_of(before))
                self._remove(self._subject_of(before), key)
            if change.type != "DELETED":
                subjects.add(self._subject_of(thing))
                self._objects[key] = self._by_subject[self._subject_of(thing)][key] = thing
        return subjects

    def refuse(self, error: BackendError) -> None:
        """Know that we can't watch these objects."""
        self.clear()
        self.is_known = True
        self.refused = error

    def close(self) -> None:
        """Mark the watch as closed."""
        if self._is_open:
            self._is_open = False
            self._heard_at = clock()

    def silence_s(self) -> float:
        """Return for how long no watch has been open."""
        return 0.0 if self._is_open or self.refused else clock() - self._heard_at

    def has_reached(self, version: int) -> bool:
        """Whether the watch has reported all changes up to a resourceVersion."""
        return self._version >= version

    def is_behind(self, subject: str, listed: Iterable[Manifest], version: int) -> bool:
        """Whether the watch is behind a list of the subject's objects at a resourceVersion."""
        uids = {thing["metadata"]["uid"] for thing in listed}
        gone = [thing for thing in self.of(subject) if thing["metadata"]["uid"] not in uids]
        newest = max((resource_version(thing) for thing in listed), default=0)
        return self._version < newest or any(resource_version(thing) <= version for thing in gone)

    def _remove(self, subject: str, key: tuple[str, str]) -> None:
        del self._by_subject[subject][key]
        if not self._by_subject[subject]:
            del self._by_subject[subject]


def resource_version(thing: Manifest) -> int:
    """Return the object's resourceVersion. A larger number is later, for all kinds."""
    return int(thing["metadata"]["resourceVersion"])


class Watches:
    """Caches of objects of a namespace: a watch for each of `indexers`, from the first read on while it is used.

    Caches are listed in the order of `indexers`: one is as new as those before it when all are known. `close` it in the
    end. `outage`: see `edl_runtime.backends.kubernetes.client.KubernetesClient`.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[ApiClient]],
        namespace: str,
        outage: Outage,
        indexers: Iterable[Indexer],
    ) -> None:
        self._connect = connect
        self._namespace = namespace
        self._outage = outage
        self._indexers = tuple(indexers)
        self._is_closed = False
        self._api: KubernetesClient | None = None
        self._running: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._changed = asyncio.Condition()
        self._changes = 0
        self._asking = 0
        self._asked_at = 0.0

    async def close(self) -> None:
        """Close the watches and the connection for good."""
        self._is_closed = True
        if self._running:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._notify()

    @asynccontextmanager
    async def using(self) -> AsyncIterator[KubernetesClient]:
        """Keep the watches, start them if they are closed, and yield their client when all objects are known.

        Raises the error of a watch.
        """
        self._asking += 1
        try:
            if not self._is_closed and (self._running is None or self._running.done()):
                self._clear()
                self._running = asyncio.create_task(self._run())
            await self._wait_until(lambda: True)
            if self._api is None:
                raise RuntimeError("the watches are not started")
            yield self._api
        finally:
            self._asking -= 1
            self._asked_at = clock()

    def _silence_s(self) -> float:
        return max(indexer.silence_s() for indexer in self._indexers if self._is_needed(indexer))

    @property
    def _address(self) -> str:
        return self._api.address if self._api else ""

    async def _wait_until(self, so: Callable[[], bool]) -> None:
        """Wait until all objects are known and `so()`. Raises the error of a watch."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._error()
                    or (all(indexer.is_known or not self._is_needed(indexer) for indexer in self._indexers) and so())
                )
            )
        if error := self._error():
            raise error.with_traceback(None)

    def _error(self) -> Exception | None:
        if self._is_closed:
            return BackendError(f"the watches of {self._namespace!r} are closed")
        errors = (indexer.error for indexer in self._indexers)
        if error := self._failure or next(filter(None, errors), None):
            return error
        if self._silence_s() > MAX_OUTAGE_S:
            return ClusterUnavailableError(self._address, f"no answer for {self._silence_s():.0f} s")
        return None

    async def _run(self) -> None:
        """Watch while the caches are used."""
        try:
            while self._idle_in() > 0:
                opened = open_client(self._connect, self._namespace, outage=self._outage)
                async with opened as api, asyncio.TaskGroup() as tasks:
                    self._api = api
                    watching = [
                        tasks.create_task(self._watch(api.everywhere() if indexer.everywhere else api, indexer))
                        for indexer in self._indexers
                    ]
                    left_s = self._idle_in()
                    while left_s > 0:
                        await asyncio.sleep(left_s)
                        left_s = self._idle_in()
                    self._clear()
                    for task in watching:
                        task.cancel()
        except Exception as error:  # noqa: BLE001 - `using` raises it
            self._failure = error
            await self._notify()

    def _idle_in(self) -> float:
        return IDLE_TIMEOUT_S if self._asking else self._asked_at + IDLE_TIMEOUT_S - clock()

    def _clear(self) -> None:
        for indexer in self._indexers:
            indexer.clear()
        self._failure = None

    async def _watch(self, api: KubernetesClient, indexer: Indexer) -> None:
        earlier = self._indexers[: self._indexers.index(indexer)]
        async with self._changed:
            await self._changed.wait_for(lambda: all(one.is_known for one in earlier) and self._is_needed(indexer))
        while True:
            pause_s = RETRY_AFTER_S
            try:
                async for change in api.changes(
                    indexer.kind,
                    labels=indexer.labels,
                    fields=indexer.fields,
                    read=indexer.read,
                    is_retried=indexer.is_retried,
                ):
                    self._applied(indexer, change, indexer.apply(change))
                    await self._notify()
            except BackendError as error:
                if indexer.is_optional and isinstance(error, ClusterError) and error.status in UNREADABLE:
                    indexer.refuse(error)
                    pause_s = REFUSED_AGAIN_S
                elif not indexer.is_retried and isinstance(error, ClusterUnavailableError):
                    indexer.refuse(error)
                else:
                    indexer.error = error
                await self._notify()
            finally:
                indexer.close()
            await asyncio.sleep(pause_s)

    def _is_needed(self, _: Indexer) -> bool:
        """Whether the cache is to be filled, now and until it is cleared."""
        return True

    def _applied(self, indexer: Indexer, change: WatchEvent, subjects: set[str]) -> None:
        """A cache has changed, for these subjects."""

    async def _notify(self) -> None:
        async with self._changed:
            self._changes += 1
            self._changed.notify_all()


class KnownJob(msgspec.Struct, frozen=True):
    """A Job or Deployment and its pods, without those of an earlier one of its name."""

    owner: Manifest
    pods: builtins.list[Manifest]

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "pods", [pod for pod in self.pods if is_pod_of(pod, self.owner)])


ByUid = Callable[[str], builtins.list[Manifest]]
"""Returns the events, or Kueue's Workloads, about the object with a uid."""


def nothing(_: str) -> builtins.list[Manifest]:
    """Return none: for a status that needs no explanation."""
    return []


def status_of(job: KnownJob, refused: ByUid = nothing, delayed: ByUid = nothing, queued: ByUid = nothing) -> JobStatus:
    """Return a job's status.

    `refused`: events of pods that could not be created; `delayed`: of those that don't start; `queued`: Workloads.
    Raises SpecError, UnexpectedError if somebody has changed its objects so that nobody understands them.
    """
    with isolated(f"job {job.owner['metadata']['name']!r}"):
        return _status_of(job, refused, delayed, queued)


def _status_of(job: KnownJob, refused: ByUid, delayed: ByUid, queued: ByUid) -> JobStatus:
    owner, pods = job.owner, job.pods
    of_job = refused(owner["metadata"]["uid"]) if lacks_pods(owner, pods) else []
    of_pods = [event for pod in pods if is_creating_containers(pod) for event in delayed(pod["metadata"]["uid"])]
    waiting = (owner, *pods) if is_queued(owner, pods) else ()
    workloads = [one for thing in waiting for one in queued(thing["metadata"]["uid"])]
    return job_status(
        owner, pods, time.time(), refusals(of_job, pods), start_delays(of_pods, pods), workloads=workloads
    )


def status_or_why(job: KnownJob, refused: ByUid, delayed: ByUid, queued: ByUid) -> JobStatus:
    """As `status_of`, for one of many jobs: one whose objects nobody understands has that as its reason."""
    try:
        return status_of(job, refused, delayed, queued)
    except (SpecError, UnexpectedError) as error:
        return unreadable_status(job.owner, str(error))


class Informer(Watches):
    """The jobs of a namespace."""

    def __init__(
        self, connect: Callable[[], AbstractAsyncContextManager[ApiClient]], namespace: str, outage: Outage
    ) -> None:
        ours = names.selector()
        self._jobs = Indexer("Job", _job_of, labels=ours, read=read_owner)
        self._deployments = Indexer("Deployment", _job_of, labels=ours, read=read_owner)
        self._pods = Indexer("Pod", _job_of, labels=ours, read=read_pod_of_job)
        self._events = Indexer("Event", uid_of_event, fields="involvedObject.kind=Job,reason=FailedCreate")
        self._events_of_pods = Indexer("Event", uid_of_event, fields=POD_EVENT_SELECTOR)
        self._workloads = Indexer("Workload", uid_of_queued, read=read_workload, is_optional=True, is_retried=False)
        self._has_queues = False
        owners, explaining = (self._jobs, self._deployments), (self._events, self._events_of_pods, self._workloads)
        super().__init__(connect, namespace, outage, (*owners, self._pods, *explaining))
        self._synced: dict[str, tuple[str, ...]] = {}  # by job, its state that the pods are as new as
        self._stale: dict[str, int] = {}  # by job, the number of the last change that watches may not have seen
        self._awaited: dict[str, Manifest] = {}  # by job, its owner as we have changed it last
        self._statuses: dict[str, JobStatus] = {}  # of trainer jobs, until one of their objects changes
        self._followers: dict[str, set[asyncio.Event]] = defaultdict(set)
        self._count = 0

    async def get(self, name: str) -> JobStatus:
        """Return the job's status, without a request if the cache is up to date.

        While the API server is away, that is the last known status, with the outage as its reason. Raises
        UnknownJobError; ClusterError; ClusterUnavailableError after MAX_OUTAGE_S.
        """
        async with self.using() as api:
            await self._catch_up(api, name)
            return self._status(name)

    async def list(self) -> builtins.list[JobStatus]:
        """Return all jobs and pools, by name; see `get`."""
        async with self.using():
            known = sorted({*self._jobs.subjects, *self._deployments.subjects, *self._stale})
            found: builtins.list[JobStatus | None] = []
            for first in range(0, len(known), BATCH_SIZE):
                found += await all_completed(*map(self._if_there, known[first : first + BATCH_SIZE]))
            return [status for status in found if status]

    async def known(self, name: str) -> KnownJob | None:
        """Return the job's objects, None if there is none; see `get`."""
        async with self.using() as api:
            await self._catch_up(api, name)
            return self._job(name)

    async def follow(self, name: str) -> AsyncIterator[KnownJob | None]:
        """Yield the job's objects as the watches report them, first and after each change; None if there is none.

        Never ends. Raises errors as `get`.
        """
        changed = asyncio.Event()
        self._followers[name].add(changed)
        try:
            while True:
                changed.clear()
                async with self.using():
                    job = self._job(name)
                yield job
                await changed.wait()
        finally:
            self._followers[name].discard(changed)
            if not self._followers[name]:
                del self._followers[name]

    async def objects(self) -> tuple[builtins.list[Manifest], builtins.list[Manifest]]:
        """Return the owners and the pods of all jobs; see `get`."""
        async with self.using():
            return [*self._jobs.all, *self._deployments.all], [*self._pods.all]

    async def wait_for_change(self, since: int) -> int:
        """Wait until the watches have reported more than `since` changes; return how many. Raises errors as `get`."""
        async with self.using():
            await self._wait_until(lambda: self._changes > since)
            return self._changes

    def mark_stale(self, name: str) -> None:
        """Have the job's objects listed again before its next status."""
        if self._running and not self._running.done():
            self._count += 1
            self._stale[name] = self._count

    def await_change(self, name: str, owner: Manifest) -> None:
        """Have the job's next status wait until the watches have reported this Job or Deployment, as it is now."""
        if self._running and not self._running.done():
            self._awaited[name] = owner

    async def close(self) -> None:
        await super().close()
        for changed in [each for events in self._followers.values() for each in events]:
            changed.set()

    def has(self, name: str) -> bool:
        return self._owner(name) is not None

    async def _if_there(self, name: str) -> JobStatus | None:
        try:
            with isolated(f"job {name!r}"):
                return await self.get(name)
        except UnknownJobError:  # it was deleted meanwhile
            return None
        except (SpecError, UnexpectedError) as error:
            owner = self._owner(name)
            return unreadable_status(owner, str(error)) if owner else None

    async def _catch_up(self, api: KubernetesClient, name: str) -> None:
        while awaited := self._awaited.get(name):
            watched = self._jobs if awaited["kind"] == "Job" else self._deployments
            await self._wait_until(partial(watched.has_reached, resource_version(awaited)))
            if self._awaited.get(name) is awaited:  # else it was changed again meanwhile
                del self._awaited[name]
        while not self._is_synced(name):
            await self._sync(api, name)

    def _is_synced(self, name: str) -> bool:
        if name in self._stale:
            return False
        owner = self._owner(name)
        state = _job_state(owner)
        if owner and state and self._pods.has_reached(resource_version(owner)):
            self._synced[name] = state
        return self._synced.get(name) == state

    async def _sync(self, api: KubernetesClient, name: str) -> None:
        """Wait until the watches have seen all current objects of the job."""
        marked = self._stale.get(name)
        state = _job_state(self._owner(name))
        # after a change of ours any watch may be behind; after a change of the Job only that of its pods
        indexers = (self._jobs, self._deployments, self._pods) if marked else (self._pods,)
        found = await all_completed(*(api.list(one.kind, labels=names.selector(name)) for one in indexers))
        listed = [(indexer, things, int(version)) for indexer, (things, version) in zip(indexers, found, strict=True)]
        await self._wait_until(lambda: not any(indexer.is_behind(name, things, at) for indexer, things, at in listed))
        if state is None:
            self._synced.pop(name, None)
        else:
            self._synced[name] = state
        if marked == self._stale.get(name):  # else it was changed again meanwhile
            self._stale.pop(name, None)

    def _status(self, name: str) -> JobStatus:
        status = self._statuses.get(name) or self._computed(name)
        if status.kind == "trainer":  # a pool's depends on the time
            self._statuses[name] = status
        if self._silence_s() < SILENCE_REPORTED_S or status.has_ended or status.reason:
            return status
        return msgspec.structs.replace(status, reason=f"the Kubernetes API at {self._address} does not answer")

    def _computed(self, name: str) -> JobStatus:
        job = self._job(name)
        if job is None:
            raise UnknownJobError(name, sorted({*self._jobs.subjects, *self._deployments.subjects}))
        return status_of(job, self._events.of, self._events_of_pods.of, self._workloads.of)

    def _job(self, name: str) -> KnownJob | None:
        owner = self._owner(name)
        return KnownJob(owner, self._pods.of(name)) if owner else None

    def _owner(self, name: str) -> Manifest | None:
        return next(iter([*self._jobs.of(name), *self._deployments.of(name)]), None)

    def _clear(self) -> None:
        super()._clear()
        self._has_queues = False
        self._synced.clear()
        self._stale.clear()
        self._awaited.clear()
        self._statuses.clear()

    def _is_needed(self, indexer: Indexer) -> bool:
        """Workloads are watched from the first job in a queue on."""
        return indexer is not self._workloads or self._has_queues

    def _applied(self, indexer: Indexer, change: WatchEvent, subjects: set[str]) -> None:
        if change.type in ("LISTED", "DELETED"):
            self._synced = {name: state for name, state in self._synced.items() if self.has(name)}
        if indexer.kind == "Workload" and change.type != "LISTED":
            owners = (owner for one in change.objects for owner in one["metadata"].get("ownerReferences", ()))
            for owner in owners:
                self._statuses.pop(owner["name"], None)
            return
        if indexer.kind in ("Event", "Workload"):
            if subjects:
                self._statuses.clear()
            return
        if not self._has_queues and any(names.QUEUE in one["metadata"].get("labels", {}) for one in change.objects):
            self._workloads.clear()  # its silence begins now
            self._has_queues = True
        for name in subjects:
            self._statuses.pop(name, None)
            for changed in self._followers.get(name, ()):
                changed.set()


def _job_of(thing: Manifest) -> str:
    return str(thing["metadata"]["labels"][names.JOB])


def uid_of_event(event: Manifest) -> str:
    """Return the uid of the object that an event is about."""
    return str(event["involvedObject"].get("uid", ""))


def _job_state(owner: Manifest | None) -> tuple[str, ...] | None:
    """Return the owner's uid and a Job's true conditions, which change after its pods did."""
    if owner is None:
        return None
    return (owner["metadata"]["uid"], *(true_conditions(owner) if owner["kind"] == "Job" else ()))
