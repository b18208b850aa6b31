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

from edl_runtime.backends.base import Backend, Capacity, JobStatus, LogLine
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.api import OUTAGE_S, Api, Change
from edl_runtime.backends.kubernetes.outage import Outage
from edl_runtime.backends.kubernetes.status import (
    EVENTS_OF_PODS,
    belongs,
    delays,
    is_being_made,
    job_status,
    lacks_pods,
    refusals,
    true_conditions,
)
from edl_runtime.errors import BackendError, ClusterUnavailableError, UnknownJobError
from edl_runtime.specs import JobSpec

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

Manifest = dict[str, Any]

IDLE_S = 30.0
"""Watches that nobody has asked for so long are closed."""

AWAY_S = 5.0
"""How long the API server may tell nothing before a status says so."""

AGAIN_S = 5.0
"""How long after the server has refused a list or a watch it is asked again."""

AT_A_TIME = 32
"""So many jobs are looked at before others in the event loop have their turn, some milliseconds."""

clock = time.monotonic


class View:
    """The objects of one kind, as a watch has told of them up to now, by what they are about.

    `fields`: those to watch, beside those of ours. `about`: what an object is about.
    """

    def __init__(self, kind: str, about: Callable[[Manifest], str], *, labels: str = "", fields: str = "") -> None:
        self.kind = kind
        self.labels = labels
        self.fields = fields
        self.trouble: BackendError | None = None
        self._about = about
        self.forget()

    def forget(self) -> None:
        """Know nothing any more."""
        self.is_known = False
        self.trouble = None
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

    def learn(self, change: Change) -> None:
        """Take in what the watch tells."""
        self._heard_at = clock()
        self._version = int(change.version)
        self._is_open = change.happened not in ("LISTED", "CLOSED")
        if change.happened == "LISTED":
            self.is_known = True
            self.trouble = None
            self._objects.clear()
            self._by_subject.clear()
        for thing in change.objects:
            name = thing["metadata"]["name"]
            if before := self._objects.pop(name, None):
                self._remove(self._about(before), name)
            if change.happened != "DELETED":
                self._objects[name] = self._by_subject[self._about(thing)][name] = thing

    def close(self) -> None:
        """Know that nobody tells of changes any more."""
        if self._is_open:
            self._is_open = False
            self._heard_at = clock()

    def silent_s(self) -> float:
        """Return for how long nobody has told of changes."""
        return 0.0 if self._is_open else clock() - self._heard_at

    def is_behind(self, subject: str, listed: Iterable[Manifest], version: int) -> bool:
        """Whether the watch has still to tell of what was listed about a subject at a version of the world."""
        uids = {thing["metadata"]["uid"] for thing in listed}
        gone = [thing for thing in self.of(subject) if thing["metadata"]["uid"] not in uids]
        newest = max((version_of(thing) for thing in listed), default=0)
        return self._version < newest or any(version_of(thing) <= version for thing in gone)

    def _remove(self, subject: str, name: str) -> None:
        del self._by_subject[subject][name]
        if not self._by_subject[subject]:
            del self._by_subject[subject]


def version_of(thing: Manifest) -> int:
    """Return the version of the world that the object is of. A larger number is a later one, for all kinds."""
    return int(thing["metadata"]["resourceVersion"])


class Mirror:
    """The jobs of a namespace. Watches them from the first `get` on, until nobody asks any more; see `close`.

    `outage`: see `edl_runtime.backends.kubernetes.api.Api`.
    """

    def __init__(
        self, connect: Callable[[], AbstractAsyncContextManager[ApiClient]], namespace: str, outage: Outage
    ) -> None:
        self._connect = connect
        self._namespace = namespace
        self._outage = outage
        ours = names.selector()
        self._jobs = View("Job", _job_of, labels=ours)
        self._deployments = View("Deployment", _job_of, labels=ours)
        self._pods = View("Pod", _job_of, labels=ours)
        self._events = View("Event", _uid_of, fields="involvedObject.kind=Job,reason=FailedCreate")
        self._events_of_pods = View("Event", _uid_of, fields=EVENTS_OF_PODS)
        self._views = (self._jobs, self._deployments, self._pods, self._events, self._events_of_pods)
        self._is_closed = False
        self._api: Api | None = None
        self._running: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._changed = asyncio.Condition()
        self._asking = 0
        self._asked_at = 0.0
        self._agreed: dict[str, tuple[str, ...]] = {}  # by job, what it has said of itself when its pods were listed
        self._doubts: dict[str, int] = {}  # by job, the number of the last change that a watch may not have told of
        self._count = 0

    async def get(self, name: str) -> JobStatus:
        """Return the job's status. Asks nobody if all that it depends on is known.

        While the API server is away, what was known last, which says so as its reason. Raises UnknownJobError;
        ClusterUnavailableError when it has been away for long; ClusterError.
        """
        self._asking += 1
        try:
            await self._begin()
            while self._is_unsure(name):
                await self._agree(name)
            return self._status(name)
        finally:
            self._asking -= 1
            self._asked_at = clock()

    async def list(self) -> builtins.list[JobStatus]:
        """Return all jobs and pools, by name; see `get`."""
        self._asking += 1
        try:
            await self._begin()
            known = sorted({*self._jobs.subjects, *self._deployments.subjects, *self._doubts})
            found: builtins.list[JobStatus | None] = []
            for first in range(0, len(known), AT_A_TIME):
                found += await asyncio.gather(*map(self._if_there, known[first : first + AT_A_TIME]))
            return [status for status in found if status]
        finally:
            self._asking -= 1
            self._asked_at = clock()

    def doubt(self, name: str) -> None:
        """Take what is known of the job for old, as something has been done to it."""
        if self._running and not self._running.done():
            self._count += 1
            self._doubts[name] = self._count

    def knows(self, name: str) -> bool:
        """Whether there is such a job, for all that is known."""
        return self._owner(name) is not None

    async def close(self) -> None:
        """Stop to watch, and close the connection, for good."""
        self._is_closed = True
        if self._running:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._tell()

    async def _if_there(self, name: str) -> JobStatus | None:
        try:
            return await self.get(name)
        except UnknownJobError:  # it is gone meanwhile
            return None

    async def _begin(self) -> None:
        """Watch, if nobody does so yet, and return when all objects are known."""
        if not self._is_closed and (self._running is None or self._running.done()):
            self._forget()
            self._running = asyncio.create_task(self._run())
        await self._until(lambda: True)

    def _is_unsure(self, name: str) -> bool:
        return name in self._doubts or self._agreed.get(name) != _says(self._owner(name))

    async def _agree(self, name: str) -> None:
        """Wait until the watches have told of all that there is of the job now."""
        doubt = self._doubts.get(name)
        says = _says(self._owner(name))
        views = (self._jobs, self._deployments, self._pods) if doubt else (self._pods,)
        found = await asyncio.gather(*(self._list(view, name) for view in views))
        listed = [(view, things, int(version)) for view, (things, version) in zip(views, found, strict=True)]
        await self._until(lambda: not any(view.is_behind(name, things, at) for view, things, at in listed))
        if says is None:
            self._agreed.pop(name, None)
        else:
            self._agreed[name] = says
        if doubt == self._doubts.get(name):
            self._doubts.pop(name, None)

    async def _list(self, view: View, name: str) -> tuple[builtins.list[Manifest], str]:
        if self._api is None:
            raise RuntimeError("a job is asked about before anybody watches")
        return await self._api.list(view.kind, labels=names.selector(name))

    def _status(self, name: str) -> JobStatus:
        owner = self._owner(name)
        if owner is None:
            raise UnknownJobError(name, sorted({*self._jobs.subjects, *self._deployments.subjects}))
        pods = [pod for pod in self._pods.of(name) if belongs(pod, owner)]
        events = self._events.of(owner["metadata"]["uid"]) if lacks_pods(owner, pods) else []
        of_pods = [
            event for pod in pods if is_being_made(pod) for event in self._events_of_pods.of(pod["metadata"]["uid"])
        ]
        status = job_status(owner, pods, time.time(), refusals(events, pods), delays(of_pods, pods))
        if self._silent_s() < AWAY_S or status.has_ended or status.reason:
            return status
        return msgspec.structs.replace(status, reason=f"the Kubernetes API at {self._address} does not answer")

    def _silent_s(self) -> float:
        """Return for how long the API server has not told of changes."""
        return max(view.silent_s() for view in self._views)

    @property
    def _address(self) -> str:
        return self._api.address if self._api else ""

    def _owner(self, name: str) -> Manifest | None:
        return next(iter([*self._jobs.of(name), *self._deployments.of(name)]), None)

    async def _until(self, so: Callable[[], bool]) -> None:
        """Wait until all objects are known and it is so. Raises what keeps the watches from telling."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._trouble() or (all(view.is_known for view in self._views) and so())
            )
        if trouble := self._trouble():
            raise trouble.with_traceback(None)

    def _trouble(self) -> Exception | None:
        if self._is_closed:
            return BackendError(f"the jobs in {self._namespace!r} are not followed any more")
        troubles = (view.trouble for view in self._views)
        if trouble := self._failure or next(filter(None, troubles), None):
            return trouble
        if self._silent_s() > OUTAGE_S:
            return ClusterUnavailableError(self._address, f"it has told nothing for {self._silent_s():.0f} s")
        return None

    async def _run(self) -> None:
        """Watch for as long as somebody asks."""
        try:
            while self._idle_in() > 0:
                async with self._connect() as client, asyncio.TaskGroup() as tasks:
                    renew = partial(self._renew, client)
                    self._api = api = Api(client, self._namespace, renew=renew, outage=self._outage)
                    watching = [tasks.create_task(self._watch(api, view)) for view in self._views]
                    left_s = self._idle_in()
                    while left_s > 0:
                        await asyncio.sleep(left_s)
                        left_s = self._idle_in()
                    self._forget()
                    for task in watching:
                        task.cancel()
        except Exception as error:  # noqa: BLE001 - whoever asks is told
            self._failure = error
            await self._tell()

    async def _renew(self, client: ApiClient) -> None:
        """Give the client, which has been open for long, the token that one has which is opened now."""
        async with self._connect() as fresh:
            client.configuration.api_key = fresh.configuration.api_key

    def _idle_in(self) -> float:
        return IDLE_S if self._asking else self._asked_at + IDLE_S - clock()

    def _forget(self) -> None:
        for view in self._views:
            view.forget()
        self._failure = None
        self._agreed.clear()
        self._doubts.clear()

    async def _watch(self, api: Api, view: View) -> None:
        while True:
            try:
                async for change in api.changes(view.kind, labels=view.labels, fields=view.fields):
                    view.learn(change)
                    if change.happened in ("LISTED", "DELETED"):
                        self._agreed = {name: says for name, says in self._agreed.items() if self.knows(name)}
                    await self._tell()
            except BackendError as error:
                view.trouble = error
                await self._tell()
            finally:
                view.close()
            await asyncio.sleep(AGAIN_S)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _job_of(thing: Manifest) -> str:
    return str(thing["metadata"]["labels"][names.JOB])


def _uid_of(event: Manifest) -> str:
    return str(event["involvedObject"].get("uid", ""))


def _says(owner: Manifest | None) -> tuple[str, ...] | None:
    """Return which one it is and, of a Job, how it fares as it says itself: its pods knew that before."""
    if owner is None:
        return None
    return (owner["metadata"]["uid"], *(true_conditions(owner) if owner["kind"] == "Job" else ()))


class Followed:
    """A backend whose jobs a mirror follows, so that `get` and `list` cost nothing; all else is the backend's own."""

    def __init__(self, backend: Backend, mirror: Mirror) -> None:
        self._backend = backend
        self._mirror = mirror

    async def submit(self, spec: JobSpec, *, token: str, secrets: Mapping[str, str]) -> JobStatus:
        status = await self._backend.submit(spec, token=token, secrets=secrets)
        self._mirror.doubt(spec.name)
        return status

    async def get(self, name: str) -> JobStatus:
        return await self._mirror.get(name)

    async def list(self) -> builtins.list[JobStatus]:
        return await self._mirror.list()

    async def resize(self, name: str, instances: int) -> JobStatus:
        status = await self._backend.resize(name, instances)
        self._mirror.doubt(name)
        return status

    def logs(
        self, name: str, *, instance: int | None = None, tail: int | None = None, follow: bool = False
    ) -> AsyncGenerator[LogLine, None]:
        return self._backend.logs(name, instance=instance, tail=tail, follow=follow)

    async def owner(self, name: str) -> str:
        return await self._backend.owner(name)

    async def delete(self, name: str, *, token: str | None = None) -> bool:
        deleted = await self._backend.delete(name, token=token)
        if self._mirror.knows(name):
            self._mirror.doubt(name)
        return deleted

    async def capacity(self) -> Capacity:
        return await self._backend.capacity()
