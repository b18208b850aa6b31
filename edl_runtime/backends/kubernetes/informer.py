"""A cache of the jobs in a namespace, kept up to date by one watch for each kind of object.

Watches of different kinds are not ordered: the end of a Job may arrive before that of its pods. So a job's pods are
listed once more whenever the conditions of its Job change, and its status is returned when the watch has caught up.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.backends.errors import ClusterUnavailableError, UnknownJobError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.client import (
    MAX_OUTAGE_S,
    KubernetesClient,
    Manifest,
    Outage,
    WatchEvent,
    open_client,
)
from edl_runtime.backends.kubernetes.job_status import job_status, lacks_pods, refusals, true_conditions
from edl_runtime.backends.kubernetes.pod_status import (
    POD_EVENT_SELECTOR,
    is_creating_containers,
    is_pod_of,
    start_delays,
)
from edl_runtime.errors import BackendError

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

IDLE_TIMEOUT_S = 30.0
"""Seconds without use after which watches are closed."""

SILENCE_REPORTED_S = 5.0
"""How long the API server may be unreachable before statuses report it."""

RETRY_AFTER_S = 5.0
"""Delay before a list or watch that the server has refused is repeated."""

BATCH_SIZE = 32
"""Jobs whose statuses are computed at a time, some milliseconds, so that other tasks of the event loop run."""

clock = time.monotonic


class Indexer:
    """The objects of one kind that a watch has reported, by subject.

    `labels`, `fields`: selectors of the objects to watch. `subject_of`: returns the subject of an object.
    """

    def __init__(self, kind: str, subject_of: Callable[[Manifest], str], *, labels: str = "", fields: str = "") -> None:
        self.kind = kind
        self.labels = labels
        self.fields = fields
        self.error: BackendError | None = None
        self._subject_of = subject_of
        self.clear()

    def clear(self) -> None:
        self.is_known = False
        self.error = None
        self._objects: dict[str, Manifest] = {}
        self._by_subject: dict[str, dict[str, Manifest]] = defaultdict(dict)
        self._version = 0
        self._is_open = False
        self._heard_at = clock()

    def of(self, subject: str) -> list[Manifest]:
        return list(self._by_subject.get(subject, {}).values())

    @property
    def subjects(self) -> Iterable[str]:
        return self._by_subject.keys()

    def apply(self, change: WatchEvent) -> None:
        self._heard_at = clock()
        self._version = int(change.version)
        self._is_open = change.type not in ("LISTED", "CLOSED")
        if change.type == "LISTED":
            self.is_known = True
            self.error = None
            self._objects.clear()
            self._by_subject.clear()
        for thing in change.objects:
            name = thing["metadata"]["name"]
            if before := self._objects.pop(name, None):
                self._remove(self._subject_of(before), name)
            if change.type != "DELETED":
                self._objects[name] = self._by_subject[self._subject_of(thing)][name] = thing

    def close(self) -> None:
        """Mark the watch as closed."""
        if self._is_open:
            self._is_open = False
            self._heard_at = clock()

    def silence_s(self) -> float:
        """Return for how long no watch has been open."""
        return 0.0 if self._is_open else clock() - self._heard_at

    def is_behind(self, subject: str, listed: Iterable[Manifest], version: int) -> bool:
        """Whether the watch is behind a list of the subject's objects at a resourceVersion."""
        uids = {thing["metadata"]["uid"] for thing in listed}
        gone = [thing for thing in self.of(subject) if thing["metadata"]["uid"] not in uids]
        newest = max((resource_version(thing) for thing in listed), default=0)
        return self._version < newest or any(resource_version(thing) <= version for thing in gone)

    def _remove(self, subject: str, name: str) -> None:
        del self._by_subject[subject][name]
        if not self._by_subject[subject]:
            del self._by_subject[subject]


def resource_version(thing: Manifest) -> int:
    """Return the object's resourceVersion. A larger number is later, for all kinds."""
    return int(thing["metadata"]["resourceVersion"])


class Informer:
    """The jobs of a namespace. Watches them from the first `get` on while it is used; `close` it in the end.

    `outage`: see `edl_runtime.backends.kubernetes.client.KubernetesClient`.
    """

    def __init__(
        self, connect: Callable[[], AbstractAsyncContextManager[ApiClient]], namespace: str, outage: Outage
    ) -> None:
        self._connect = connect
        self._namespace = namespace
        self._outage = outage
        ours = names.selector()
        self._jobs = Indexer("Job", _job_of, labels=ours)
        self._deployments = Indexer("Deployment", _job_of, labels=ours)
        self._pods = Indexer("Pod", _job_of, labels=ours)
        self._events = Indexer("Event", _uid_of, fields="involvedObject.kind=Job,reason=FailedCreate")
        self._events_of_pods = Indexer("Event", _uid_of, fields=POD_EVENT_SELECTOR)
        self._indexers = (self._jobs, self._deployments, self._pods, self._events, self._events_of_pods)
        self._is_closed = False
        self._api: KubernetesClient | None = None
        self._running: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._changed = asyncio.Condition()
        self._changes = 0
        self._asking = 0
        self._asked_at = 0.0
        self._synced: dict[str, tuple[str, ...]] = {}  # by job, its state when its pods were listed
        self._stale: dict[str, int] = {}  # by job, the number of the last change that watches may not have seen
        self._count = 0

    async def get(self, name: str) -> JobStatus:
        """Return the job's status, without a request if the cache is up to date.

        While the API server is away, that is the last known status, with the outage as its reason. Raises
        UnknownJobError; ClusterError; ClusterUnavailableError after MAX_OUTAGE_S.
        """
        self._asking += 1
        try:
            await self._begin()
            while self._is_stale(name):
                await self._sync(name)
            return self._status(name)
        finally:
            self._asking -= 1
            self._asked_at = clock()

    async def list(self) -> builtins.list[JobStatus]:
        """Return all jobs and pools, by name; see `get`."""
        self._asking += 1
        try:
            await self._begin()
            known = sorted({*self._jobs.subjects, *self._deployments.subjects, *self._stale})
            found: builtins.list[JobStatus | None] = []
            for first in range(0, len(known), BATCH_SIZE):
                found += await asyncio.gather(*map(self._if_there, known[first : first + BATCH_SIZE]))
            return [status for status in found if status]
        finally:
            self._asking -= 1
            self._asked_at = clock()

    async def wait_for_change(self, since: int) -> int:
        """Wait until the watches have reported more than `since` changes; return how many. Raises errors as `get`."""
        self._asking += 1
        try:
            await self._begin()
            await self._wait_until(lambda: self._changes > since)
            return self._changes
        finally:
            self._asking -= 1
            self._asked_at = clock()

    def mark_stale(self, name: str) -> None:
        """Have the job's objects listed again before its next status."""
        if self._running and not self._running.done():
            self._count += 1
            self._stale[name] = self._count

    def has(self, name: str) -> bool:
        return self._owner(name) is not None

    async def close(self) -> None:
        """Close the watches and the connection for good."""
        self._is_closed = True
        if self._running:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._notify()

    async def _if_there(self, name: str) -> JobStatus | None:
        try:
            return await self.get(name)
        except UnknownJobError:  # it was deleted meanwhile
            return None

    async def _begin(self) -> None:
        """Start the watches if they are closed, and return when all objects are known."""
        if not self._is_closed and (self._running is None or self._running.done()):
            self._clear()
            self._running = asyncio.create_task(self._run())
        await self._wait_until(lambda: True)

    def _is_stale(self, name: str) -> bool:
        return name in self._stale or self._synced.get(name) != _job_state(self._owner(name))

    async def _sync(self, name: str) -> None:
        """Wait until the watches have seen all current objects of the job."""
        marked = self._stale.get(name)
        state = _job_state(self._owner(name))
        # after a change of ours any watch may be behind; after a change of the Job only that of its pods
        indexers = (self._jobs, self._deployments, self._pods) if marked else (self._pods,)
        found = await asyncio.gather(*(self._list(indexer, name) for indexer in indexers))
        listed = [(indexer, things, int(version)) for indexer, (things, version) in zip(indexers, found, strict=True)]
        await self._wait_until(lambda: not any(indexer.is_behind(name, things, at) for indexer, things, at in listed))
        if state is None:
            self._synced.pop(name, None)
        else:
            self._synced[name] = state
        if marked == self._stale.get(name):  # else it was changed again meanwhile
            self._stale.pop(name, None)

    async def _list(self, indexer: Indexer, name: str) -> tuple[builtins.list[Manifest], str]:
        if self._api is None:
            raise RuntimeError("the informer is not started")
        return await self._api.list(indexer.kind, labels=names.selector(name))

    def _status(self, name: str) -> JobStatus:
        owner = self._owner(name)
        if owner is None:
            raise UnknownJobError(name, sorted({*self._jobs.subjects, *self._deployments.subjects}))
        pods = [pod for pod in self._pods.of(name) if is_pod_of(pod, owner)]
        events = self._events.of(owner["metadata"]["uid"]) if lacks_pods(owner, pods) else []
        of_pods = [
            event
            for pod in pods
            if is_creating_containers(pod)
            for event in self._events_of_pods.of(pod["metadata"]["uid"])
        ]
        status = job_status(owner, pods, time.time(), refusals(events, pods), start_delays(of_pods, pods))
        if self._silence_s() < SILENCE_REPORTED_S or status.has_ended or status.reason:
            return status
        return msgspec.structs.replace(status, reason=f"the Kubernetes API at {self._address} does not answer")

    def _silence_s(self) -> float:
        return max(indexer.silence_s() for indexer in self._indexers)

    @property
    def _address(self) -> str:
        return self._api.address if self._api else ""

    def _owner(self, name: str) -> Manifest | None:
        return next(iter([*self._jobs.of(name), *self._deployments.of(name)]), None)

    async def _wait_until(self, so: Callable[[], bool]) -> None:
        """Wait until all objects are known and `so()`. Raises the error of a watch."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._error() or (all(indexer.is_known for indexer in self._indexers) and so())
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
        """Watch while the informer is used."""
        try:
            while self._idle_in() > 0:
                opened = open_client(self._connect, self._namespace, outage=self._outage)
                async with opened as api, asyncio.TaskGroup() as tasks:
                    self._api = api
                    watching = [tasks.create_task(self._watch(api, indexer)) for indexer in self._indexers]
                    left_s = self._idle_in()
                    while left_s > 0:
                        await asyncio.sleep(left_s)
                        left_s = self._idle_in()
                    self._clear()
                    for task in watching:
                        task.cancel()
        except Exception as error:  # noqa: BLE001 - `get` and `list` raise it
            self._failure = error
            await self._notify()

    def _idle_in(self) -> float:
        return IDLE_TIMEOUT_S if self._asking else self._asked_at + IDLE_TIMEOUT_S - clock()

    def _clear(self) -> None:
        for indexer in self._indexers:
            indexer.clear()
        self._failure = None
        self._synced.clear()
        self._stale.clear()

    async def _watch(self, api: KubernetesClient, indexer: Indexer) -> None:
        while True:
            try:
                async for change in api.changes(indexer.kind, labels=indexer.labels, fields=indexer.fields):
                    indexer.apply(change)
                    if change.type in ("LISTED", "DELETED"):
                        self._synced = {name: state for name, state in self._synced.items() if self.has(name)}
                    await self._notify()
            except BackendError as error:
                indexer.error = error
                await self._notify()
            finally:
                indexer.close()
            await asyncio.sleep(RETRY_AFTER_S)

    async def _notify(self) -> None:
        async with self._changed:
            self._changes += 1
            self._changed.notify_all()


def _job_of(thing: Manifest) -> str:
    return str(thing["metadata"]["labels"][names.JOB])


def _uid_of(event: Manifest) -> str:
    return str(event["involvedObject"].get("uid", ""))


def _job_state(owner: Manifest | None) -> tuple[str, ...] | None:
    """Return the owner's uid and a Job's true conditions, which change after its pods did."""
    if owner is None:
        return None
    return (owner["metadata"]["uid"], *(true_conditions(owner) if owner["kind"] == "Job" else ()))
