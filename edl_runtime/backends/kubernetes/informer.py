"""What a process knows of the jobs of a namespace, kept up to date by watches, so that nobody has to ask again.

One watch for each kind of object, whatever the number of jobs. Each tells of its kind in order, and nothing of the
others: what a Job has come to may be known here before the pods that it has come to it by. So a job's pods are listed
once more whenever what it says of itself has changed, and a status is given when the watch has told of all of them.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from edl_runtime.backends.errors import ClusterUnavailableError, UnknownJobError
from edl_runtime.backends.interface import Backend, Capacity, JobStatus, LogLine
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.client import MAX_OUTAGE_S, KubernetesClient, Outage, WatchEvent
from edl_runtime.backends.kubernetes.job_status import job_status, lacks_pods, refusals, true_conditions
from edl_runtime.backends.kubernetes.pod_status import (
    POD_EVENT_SELECTOR,
    is_creating_containers,
    is_pod_of,
    start_delays,
)
from edl_runtime.errors import BackendError
from edl_runtime.specs import JobSpec

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

Manifest = dict[str, Any]

IDLE_TIMEOUT_S = 30.0
"""Watches that nobody has asked for so long are closed."""

SILENCE_REPORTED_S = 5.0
"""How long the API server may tell nothing before a status says so."""

RETRY_AFTER_S = 5.0
"""How long after the server has refused a list or a watch it is asked again."""

BATCH_SIZE = 32
"""So many jobs are looked at before others in the event loop have their turn, some milliseconds."""

clock = time.monotonic


class Indexer:
    """The objects of one kind, as a watch has told of them up to now, by what they are about.

    `fields`: those to watch, beside those of ours. `subject_of`: what an object is about.
    """

    def __init__(self, kind: str, subject_of: Callable[[Manifest], str], *, labels: str = "", fields: str = "") -> None:
        self.kind = kind
        self.labels = labels
        self.fields = fields
        self.error: BackendError | None = None
        self._subject_of = subject_of
        self.clear()

    def clear(self) -> None:
        """Know nothing any more."""
        self.is_known = False
        self.error = None
        self._objects: dict[str, Manifest] = {}
        self._by_subject: dict[str, dict[str, Manifest]] = defaultdict(dict)
        self._version = 0
        self._is_open = False
        self._heard_at = clock()

    def of(self, subject: str) -> list[Manifest]:
        """Return the objects about that."""
        return list(self._by_subject.get(subject, {}).values())

    @property
    def subjects(self) -> Iterable[str]:
        """What there are objects about."""
        return self._by_subject.keys()

    def apply(self, change: WatchEvent) -> None:
        """Take in what the watch tells."""
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
        """Know that nobody tells of changes any more."""
        if self._is_open:
            self._is_open = False
            self._heard_at = clock()

    def silence_s(self) -> float:
        """Return for how long nobody has told of changes."""
        return 0.0 if self._is_open else clock() - self._heard_at

    def is_behind(self, subject: str, listed: Iterable[Manifest], version: int) -> bool:
        """Whether the watch has still to tell of what was listed about a subject at a version of the world."""
        uids = {thing["metadata"]["uid"] for thing in listed}
        gone = [thing for thing in self.of(subject) if thing["metadata"]["uid"] not in uids]
        newest = max((resource_version(thing) for thing in listed), default=0)
        return self._version < newest or any(resource_version(thing) <= version for thing in gone)

    def _remove(self, subject: str, name: str) -> None:
        del self._by_subject[subject][name]
        if not self._by_subject[subject]:
            del self._by_subject[subject]


def resource_version(thing: Manifest) -> int:
    """Return the version of the world that the object is of. A larger number is a later one, for all kinds."""
    return int(thing["metadata"]["resourceVersion"])


class Informer:
    """The jobs of a namespace. Watches them from the first `get` on, until nobody asks any more; see `close`.

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
        self._asking = 0
        self._asked_at = 0.0
        self._synced: dict[str, tuple[str, ...]] = {}  # by job, what it has said of itself when its pods were listed
        self._stale: dict[str, int] = {}  # by job, the number of the last change that a watch may not have told of
        self._count = 0

    async def get(self, name: str) -> JobStatus:
        """Return the job's status. Asks nobody if all that it depends on is known.

        While the API server is away, what was known last, which says so as its reason. Raises UnknownJobError;
        ClusterUnavailableError when it has been away for long; ClusterError.
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

    def mark_stale(self, name: str) -> None:
        """Take what is known of the job for old, as something has been done to it."""
        if self._running and not self._running.done():
            self._count += 1
            self._stale[name] = self._count

    def has(self, name: str) -> bool:
        """Whether there is such a job, for all that is known."""
        return self._owner(name) is not None

    async def close(self) -> None:
        """Stop to watch, and close the connection, for good."""
        self._is_closed = True
        if self._running:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._notify()

    async def _if_there(self, name: str) -> JobStatus | None:
        try:
            return await self.get(name)
        except UnknownJobError:  # it is gone meanwhile
            return None

    async def _begin(self) -> None:
        """Watch, if nobody does so yet, and return when all objects are known."""
        if not self._is_closed and (self._running is None or self._running.done()):
            self._clear()
            self._running = asyncio.create_task(self._run())
        await self._wait_until(lambda: True)

    def _is_stale(self, name: str) -> bool:
        return name in self._stale or self._synced.get(name) != _job_state(self._owner(name))

    async def _sync(self, name: str) -> None:
        """Wait until the watches have told of all that there is of the job now."""
        marked = self._stale.get(name)
        says = _job_state(self._owner(name))
        indexers = (self._jobs, self._deployments, self._pods) if marked else (self._pods,)
        found = await asyncio.gather(*(self._list(indexer, name) for indexer in indexers))
        listed = [(indexer, things, int(version)) for indexer, (things, version) in zip(indexers, found, strict=True)]
        await self._wait_until(lambda: not any(indexer.is_behind(name, things, at) for indexer, things, at in listed))
        if says is None:
            self._synced.pop(name, None)
        else:
            self._synced[name] = says
        if marked == self._stale.get(name):
            self._stale.pop(name, None)

    async def _list(self, indexer: Indexer, name: str) -> tuple[builtins.list[Manifest], str]:
        if self._api is None:
            raise RuntimeError("a job is asked about before anybody watches")
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
        """Return for how long the API server has not told of changes."""
        return max(indexer.silence_s() for indexer in self._indexers)

    @property
    def _address(self) -> str:
        return self._api.address if self._api else ""

    def _owner(self, name: str) -> Manifest | None:
        return next(iter([*self._jobs.of(name), *self._deployments.of(name)]), None)

    async def _wait_until(self, so: Callable[[], bool]) -> None:
        """Wait until all objects are known and it is so. Raises what keeps the watches from telling."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._error() or (all(indexer.is_known for indexer in self._indexers) and so())
            )
        if error := self._error():
            raise error.with_traceback(None)

    def _error(self) -> Exception | None:
        if self._is_closed:
            return BackendError(f"the jobs in {self._namespace!r} are not followed any more")
        errors = (indexer.error for indexer in self._indexers)
        if error := self._failure or next(filter(None, errors), None):
            return error
        if self._silence_s() > MAX_OUTAGE_S:
            return ClusterUnavailableError(self._address, f"it has told nothing for {self._silence_s():.0f} s")
        return None

    async def _run(self) -> None:
        """Watch for as long as somebody asks."""
        try:
            while self._idle_in() > 0:
                async with self._connect() as client, asyncio.TaskGroup() as tasks:
                    renew = partial(self._renew, client)
                    self._api = api = KubernetesClient(client, self._namespace, renew=renew, outage=self._outage)
                    watching = [tasks.create_task(self._watch(api, indexer)) for indexer in self._indexers]
                    left_s = self._idle_in()
                    while left_s > 0:
                        await asyncio.sleep(left_s)
                        left_s = self._idle_in()
                    self._clear()
                    for task in watching:
                        task.cancel()
        except Exception as error:  # noqa: BLE001 - whoever asks is told
            self._failure = error
            await self._notify()

    async def _renew(self, client: ApiClient) -> None:
        """Give the client, which has been open for long, the token that one has which is opened now."""
        async with self._connect() as fresh:
            client.configuration.api_key = fresh.configuration.api_key

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
                        self._synced = {name: says for name, says in self._synced.items() if self.has(name)}
                    await self._notify()
            except BackendError as error:
                indexer.error = error
                await self._notify()
            finally:
                indexer.close()
            await asyncio.sleep(RETRY_AFTER_S)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _job_of(thing: Manifest) -> str:
    return str(thing["metadata"]["labels"][names.JOB])


def _uid_of(event: Manifest) -> str:
    return str(event["involvedObject"].get("uid", ""))


def _job_state(owner: Manifest | None) -> tuple[str, ...] | None:
    """Return which one it is and, of a Job, how it fares as it says itself: its pods knew that before."""
    if owner is None:
        return None
    return (owner["metadata"]["uid"], *(true_conditions(owner) if owner["kind"] == "Job" else ()))


class InformedBackend:
    """A backend whose jobs a mirror follows, so that `get` and `list` cost nothing; all else is the backend's own."""

    def __init__(self, backend: Backend, informer: Informer) -> None:
        self._backend = backend
        self._informer = informer

    async def submit(self, spec: JobSpec, *, token: str, secrets: Mapping[str, str]) -> JobStatus:
        status = await self._backend.submit(spec, token=token, secrets=secrets)
        self._informer.mark_stale(spec.name)
        return status

    async def get(self, name: str) -> JobStatus:
        return await self._informer.get(name)

    async def list(self) -> builtins.list[JobStatus]:
        return await self._informer.list()

    async def resize(self, name: str, instances: int) -> JobStatus:
        status = await self._backend.resize(name, instances)
        self._informer.mark_stale(name)
        return status

    def logs(
        self, name: str, *, instance: int | None = None, tail: int | None = None, follow: bool = False
    ) -> AsyncGenerator[LogLine, None]:
        return self._backend.logs(name, instance=instance, tail=tail, follow=follow)

    async def owner(self, name: str) -> str:
        return await self._backend.owner(name)

    async def delete(self, name: str, *, token: str | None = None) -> bool:
        deleted = await self._backend.delete(name, token=token)
        if self._informer.has(name):
            self._informer.mark_stale(name)
        return deleted

    async def capacity(self) -> Capacity:
        return await self._backend.capacity()
