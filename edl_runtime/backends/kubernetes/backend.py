"""The Kubernetes backend's verbs."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from edl_runtime.backends.base import Backend, Capacity, JobStatus, LogLine, check_size, owner_of, refuse_strangers
from edl_runtime.backends.kubernetes import archive, capacity, logs, manifests, names
from edl_runtime.backends.kubernetes.api import Api
from edl_runtime.backends.kubernetes.mirror import Followed, Mirror
from edl_runtime.backends.kubernetes.outage import Outage
from edl_runtime.backends.kubernetes.status import (
    EVENTS_OF_PODS,
    belongs,
    bounds,
    by_age,
    completions_for,
    delays,
    has_ended,
    index_of,
    interrupts,
    is_being_made,
    is_leaving,
    job_status,
    lacks_pods,
    pool_instances,
    pool_pods,
    refusals,
    waits_in_queue,
    wanted,
)
from edl_runtime.errors import (
    BackendError,
    ClusterError,
    ConflictError,
    JobEndedError,
    SpecError,
    SubmitError,
    UnknownJobError,
)
from edl_runtime.log import get_logger
from edl_runtime.pods import Pod
from edl_runtime.specs import JobSpec, check_name

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

Manifest = dict[str, Any]

_PLACED = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""Pods that take something of a node, as a field selector."""

OWNERS = ("Job", "Deployment")
"""What a trainer job and a pool are."""

LAST_WORDS_S = 3.0
"""How long a job is deleted later to have its logs opened, and how long these are read when its last pod is gone."""

log = get_logger(__name__)


class KubernetesBackend:
    """Runs jobs as pods in one namespace; see `edl_runtime.backends.base.Backend` for what the verbs promise.

    All who use the same namespace see the same jobs. `connect` opens a client of the cluster; `defaults`: what specs of
    pods leave open.

    The cluster's own rules decide when an instance is started again: those of a pool as often as need be, with up to
    five minutes between two; those of a trainer job five times in all, and after evictions and the like as often as
    `Pod.disruptions` says. A number that was given up is not tried again when a job of trainers grows: a new one takes
    its place. Of instances that have left by a resize only those see the log who follow it; of a job that was deleted,
    the last lines are kept for a while.

    All verbs raise ClusterUnavailableError and ClusterError.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[ApiClient]],
        *,
        namespace: str,
        defaults: Pod | None = None,
    ) -> None:
        self._connect = connect
        self._namespace = namespace
        self._defaults = defaults or Pod()
        self._outage = Outage()
        self._mirrors: dict[asyncio.AbstractEventLoop, tuple[Mirror, set[object]]] = {}

    @asynccontextmanager
    async def following(self) -> AsyncIterator[Backend]:
        """Yield this backend as one whose `get` and `list` ask the cluster nothing: watches keep it up to date.

        They begin with the first of these, and are closed while nobody asks for a while, and on exit. All who have it
        open in the same event loop at the same time share them, so one backend for many tasks costs as much as for one.
        What is done by the backend that is yielded is seen by its next look. While the API server is away, these return
        what was known last; they raise ClusterUnavailableError when that lasts.
        """
        loop, user = asyncio.get_running_loop(), object()
        mirror, users = self._mirrors.setdefault(loop, (Mirror(self._connect, self._namespace, self._outage), set()))
        users.add(user)
        try:
            yield Followed(self, mirror)
        finally:
            users.remove(user)
            if not users:
                del self._mirrors[loop]
                await mirror.close()

    async def submit(self, spec: JobSpec, *, token: str, secrets: Mapping[str, str]) -> JobStatus:
        """Get or create the job. What a caller that dies leaves half done has its token and no instances."""
        manifest = manifests.owner_of_all(spec, token=token, created_at=time.time(), defaults=self._defaults)
        async with self._api() as api:
            while True:
                owner = await _find(api, spec.name)
                if owner is None:
                    await _rehearse(api, manifest, spec)
                    if created := await _create(api, manifest, spec.name):
                        return await _start(api, created, spec, secrets)
                    continue
                if is_leaving(owner):
                    await _gone(api, owner)
                    continue
                status = await _status(api, owner)
                refuse_strangers(status, token)
                try:
                    if status.digest == spec.digest and status.phase != "failed":
                        adopted = await _annotate(api, owner, {names.TOKEN: token})
                        return await _start(api, adopted, spec, secrets)
                    await _remove(api, owner)
                except ConflictError:  # it has changed since
                    continue
                manifest["metadata"]["annotations"][names.CREATED_AT] = repr(time.time())

    async def get(self, name: str) -> JobStatus:
        async with self._api() as api:
            return await _status(api, await self._owner(api, name))

    async def list(self) -> builtins.list[JobStatus]:
        async with self._api() as api:
            found = await asyncio.gather(*(api.list(kind, labels=names.selector()) for kind in (*OWNERS, "Pod")))
            *owners, pods = (items for items, _ in found)
            by_job: dict[str, list[Manifest]] = defaultdict(list)
            for pod in pods:
                by_job[pod["metadata"]["labels"][names.JOB]].append(pod)
            statuses = await asyncio.gather(
                *(_status_by(api, owner, by_job[owner["metadata"]["name"]]) for kind in owners for owner in kind)
            )
        return sorted(statuses, key=lambda status: status.name)

    async def resize(self, name: str, instances: int) -> JobStatus:
        async with self._api() as api:
            while True:
                owner = await self._owner(api, name)
                status = await _status(api, owner)
                if is_leaving(owner) or status.has_ended:
                    ended = "is ending" if is_leaving(owner) else f"has {status.phase}"
                    raise JobEndedError(name, ended)
                check_size(instances, bounds(owner))
                try:
                    return await _status(api, await _resize(api, owner, instances, status))
                except ConflictError:
                    continue

    async def logs(
        self, name: str, *, instance: int | None = None, tail: int | None = None, follow: bool = False
    ) -> AsyncGenerator[LogLine, None]:
        async with self._api() as api:
            owner = await _find(api, name)
            if owner is None:
                kept = await _archived(api, name)
                if kept is None:
                    raise UnknownJobError(name, await self._known(api))
                for line in _lines_of(kept.lines, instance, tail):
                    yield line
            elif follow:
                async with aclosing(_follow(api, owner, instance=instance, last=tail)) as lines:
                    async for line in lines:
                        yield line
            else:
                pods, _ = await api.list("Pod", labels=names.selector(name))
                numbered = [(number, pod) for number, pod in _numbered(owner, pods) if instance in (None, number)]
                async for line in logs.read(api, numbered, tail):
                    yield line

    async def owner(self, name: str) -> str:
        async with self._api() as api:
            if there := await _find(api, name):
                return owner_of(there["metadata"]["annotations"].get(names.TOKEN, ""))
            if (kept := await _archived(api, name)) is None:
                raise UnknownJobError(name, await self._known(api))
            return kept.owner

    async def delete(self, name: str, *, token: str | None = None) -> bool:
        async with self._api() as api:
            while True:
                owner = await _find(api, name)
                if owner is None or token not in (None, owner["metadata"]["annotations"].get(names.TOKEN)):
                    return False
                try:
                    await _remove(api, owner)
                except ConflictError:
                    continue
                return True

    async def capacity(self) -> Capacity:
        """Return what the nodes have, and what the namespace's quota leaves of it.

        Where the nodes may not be seen, that is one node "quota of NAMESPACE" which has what the quota has; see
        `Capacity.only_node`. Raises BackendError where there is no quota either.
        """
        async with self._api() as api:
            (quotas, _), (ours, _), *found = await asyncio.gather(
                api.list("ResourceQuota"),
                api.list("Pod", labels=names.selector()),
                *(api.list(kind, labels=names.selector()) for kind in OWNERS),
            )
            try:
                nodes, others = await asyncio.gather(
                    api.list_everywhere("Node", capacity.seen),
                    api.list_everywhere("Pod", capacity.taken, fields=_PLACED),
                )
            except ClusterError as error:
                if error.status != 403:
                    raise
                of_nodes, why = None, str(error)
            else:
                of_nodes, why = (nodes, others), ""
        gone = capacity.leaving(ours, [owner for owners, _ in found for owner in owners])
        total, left = capacity.of_quotas(quotas, ours, gone)
        placed = None
        if of_nodes:
            nodes, others = of_nodes
            placed = capacity.of_nodes(nodes, others, gone)
        if there := capacity.capacity_of(placed, total, left, self._namespace):
            return there
        raise BackendError(
            f"nobody says how much there is for instances: the namespace {self._namespace!r} has no ResourceQuota, and "
            f"{why}; grant the ClusterRole of deploy/cluster-role.yaml"
        )

    @asynccontextmanager
    async def _api(self) -> AsyncIterator[Api]:
        async with self._connect() as client:
            yield Api(client, self._namespace, outage=self._outage)

    async def _owner(self, api: Api, name: str) -> Manifest:
        owner = await _find(api, name)
        if owner is None:
            raise UnknownJobError(name, await self._known(api))
        return owner

    async def _known(self, api: Api) -> builtins.list[str]:
        found = await asyncio.gather(*(api.list(kind, labels=names.selector()) for kind in OWNERS))
        return sorted(owner["metadata"]["name"] for owners, _ in found for owner in owners)


async def _find(api: Api, name: str) -> Manifest | None:
    """Return the Job or Deployment of that name, if it is one of ours."""
    try:
        check_name("name", name)
    except SpecError:
        return None
    found = await asyncio.gather(*(api.list(kind, labels=names.selector(name)) for kind in OWNERS))
    owners = [owner for items, _ in found for owner in items]
    return owners[0] if owners else None


async def _archived(api: Api, name: str) -> archive.Archived | None:
    try:
        return await archive.read(api, check_name("name", name))
    except SpecError:
        return None


async def _rehearse(api: Api, manifest: Manifest, spec: JobSpec) -> None:
    """Let the cluster judge all that a job takes, so that nothing is made where something is wrong or forbidden.

    Also what is done to it later: what can't be resized or deleted is not begun.

    Raises SubmitError.
    """
    owned = _owned(spec, {})
    judged = await asyncio.gather(
        # asking for metadata is a dry-run PATCH: of the job itself it shows that it may be resized
        *(_owned_before(api, one, spec.name) for one in (manifest, *owned, archive.place_of(spec.name))),
        api.create(manifest, rehearse=True),
        *(api.apply(one, rehearse=True) for one in owned),
        api.list("Pod", labels=names.selector(spec.name)),
        api.list("Event", fields=f"involvedObject.name={spec.name}"),
        api.get(manifest["kind"], spec.name),
        api.rehearse_delete(manifest),
        api.rehearse_watch(manifest["kind"]),
        *(_rehearse_shrinking(api, spec.name) if spec.kind == "pool" else ()),
        return_exceptions=True,
    )
    errors = [error for error in judged if isinstance(error, BaseException)]
    for error in errors:
        if not isinstance(error, ClusterError | SubmitError):
            raise error
    # a conflict says that the job is there by now, which `_create` sees to
    refused = [error for error in errors if not isinstance(error, ConflictError)]
    if refused:
        said = [error.reason if isinstance(error, SubmitError) else str(error) for error in refused]
        raise SubmitError(spec.name, "; ".join(dict.fromkeys(said)))


def _rehearse_shrinking(api: Api, name: str) -> builtins.list[Awaitable[object]]:
    """Return what asks whether pods of a pool may be marked and deleted, by a name that none of them has."""
    pod = {"kind": "Pod", "metadata": {"name": name}}
    return [api.metadata(pod), api.rehearse_delete(pod)]


async def _create(api: Api, manifest: Manifest, name: str) -> Manifest | None:
    """Create the owner of all else; None if somebody has just done so. Raises SubmitError."""
    try:
        return await api.create(manifest)
    except ConflictError as error:
        if await _find(api, name):
            return None
        raise _not_ours(manifest, name) from error
    except ClusterError as error:
        raise SubmitError(name, str(error)) from error


async def _start(api: Api, owner: Manifest, spec: JobSpec, secrets: Mapping[str, str]) -> JobStatus:
    """Make all else that belongs to the job, and let it begin, unless that was done before."""
    owned = _owned(spec, secrets)
    for manifest in owned:
        manifest["metadata"]["ownerReferences"] = [_reference(owner)]
    await asyncio.gather(*(_make(api, manifest, spec.name) for manifest in owned))
    while names.STARTED not in owner["metadata"]["annotations"]:
        queued = names.QUEUE in owner["metadata"]["labels"]  # then it is Kueue that lets it begin
        suspend = {} if queued else {"suspend": wanted(owner) == 0}
        begin = {"replicas": wanted(owner)} if owner["kind"] == "Deployment" else suspend
        try:
            owner = await _annotate(api, owner, {names.STARTED: "true"}, begin)
        except ConflictError:
            owner = await api.get(owner["kind"], spec.name) or owner
    return await _status(api, owner)


async def _make(api: Api, manifest: Manifest, job: str) -> None:
    """Make something of a job what the manifest says. Raises SubmitError where somebody else has one of its name."""
    while True:
        there = await _owned_before(api, manifest, job)
        try:
            if there is None:
                await api.create(manifest)
            else:
                await api.apply(manifest, over=there)
        except ConflictError:  # it came, went or changed since
            continue
        return


async def _owned_before(api: Api, manifest: Manifest, job: str) -> Manifest | None:
    """Return the metadata of what has that kind and name, if anything has. Raises SubmitError if it isn't the job's."""
    there = await api.metadata(manifest)
    labels = (there or {}).get("labels") or {}
    if there is None or names.is_of(labels, job):
        return there
    raise _not_ours(manifest, job)


def _not_ours(manifest: Manifest, job: str) -> SubmitError:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    return SubmitError(job, f"the {kind} {name!r} is there and is not ours; give the job another name, or remove that")


def _owned(spec: JobSpec, secrets: Mapping[str, str]) -> list[Manifest]:
    return [manifests.secret(spec, secrets), *([manifests.disruption_budget(spec)] if spec.kind == "pool" else [])]


async def _annotate(
    api: Api, owner: Manifest, annotations: Mapping[str, str], spec: Mapping[str, Any] | None = None
) -> Manifest:
    """Change annotations of an owner, and of its spec what is given. Raises ConflictError if it has changed since."""
    metadata = {"resourceVersion": owner["metadata"]["resourceVersion"], "annotations": dict(annotations)}
    return await api.patch(owner, {"metadata": metadata, **({"spec": dict(spec)} if spec else {})})


async def _resize(api: Api, owner: Manifest, instances: int, before: JobStatus) -> Manifest:
    size = {names.WANTED: str(instances)}
    if instances != wanted(owner) and (instances or interrupts(before)):
        size[names.RESIZED_AT] = repr(time.time())
    if owner["kind"] == "Job":
        return await _resize_job(api, owner, instances, size)
    found, _ = await api.list("Pod", labels=names.selector(owner["metadata"]["name"]))
    pods = pool_pods(found)
    seen = {one.status.pod: one.status for one in pool_instances(pods, time.time())}
    costs = {pod: {"annotations": {names.DELETION_COST: str(-status.index)}} for pod, status in seen.items()}
    if 0 < instances < len(seen):  # the highest index leaves first
        marked = (api.patch(pod, {"metadata": costs[pod["metadata"]["name"]]}) for pod in pods)
        await asyncio.gather(*marked)
    resized = await _annotate(api, owner, size, {"replicas": instances})
    if instances > wanted(owner):  # those that had been given up are tried anew
        given_up = [pod for pod in pods if seen[pod["metadata"]["name"]].given_up]
        await asyncio.gather(*(api.delete(pod) for pod in given_up))
    return resized


async def _resize_job(api: Api, owner: Manifest, instances: int, size: Mapping[str, str]) -> Manifest:
    """Change the number of a Job's indexes, or suspend it: it can't have none.

    One that has not begun, or that Kueue lets run, begins when these let it. Raises BackendError for what Kueue would
    undo, or answer by stopping the job.
    """
    queue = owner["metadata"]["labels"].get(names.QUEUE)
    begins_itself = names.STARTED not in owner["metadata"]["annotations"] or queue is not None
    if queue is not None:
        await _check_queue(api, owner, queue, instances)
    if instances == 0:
        return await _annotate(api, owner, size, {"suspend": True})
    if wanted(owner) == 0:
        await _forget_who_left(api, owner)
    completions = completions_for(owner, instances)
    elastic = owner["metadata"]["annotations"].get(names.ELASTIC) == "true"
    spec = {
        "parallelism": completions,
        "completions": completions,
        "maxFailedIndexes": manifests.most_given_up(completions, bounds(owner), elastic=elastic),
        **({} if begins_itself else {"suspend": False}),
    }
    return await _annotate(api, owner, size, spec)


async def _check_queue(api: Api, owner: Manifest, queue: str, instances: int) -> None:
    """Raise BackendError if Kueue, in whose queue the Job is, would not let it have so many instances.

    Kueue stops a running Job whose size changes, unless it took the Job as elastic when that was made; and of one that
    grows again before its last growth was admitted, it may admit the wrong pods (kubernetes-sigs/kueue#14580).
    """
    name = owner["metadata"]["name"]
    if instances == 0:
        raise BackendError(f"{name!r} is in Kueue's queue {queue!r}, which alone says when it is suspended")
    if owner["spec"].get("suspend") or instances == wanted(owner):
        return
    if not waits_in_queue(owner["spec"]["template"]):
        raise BackendError(
            f"{name!r} runs in Kueue's queue {queue!r}, which would stop it if its size changed: resizing takes a job "
            "that was made under Kueue 0.18, or under 0.13 with the feature gate ElasticJobsViaWorkloadSlices"
        )
    if instances < wanted(owner):
        return
    found, _ = await api.list("Pod", labels=names.selector(name))
    gated = sum(belongs(pod, owner) and waits_in_queue(pod) for pod in found)
    if gated:
        raise BackendError(
            f"{gated} of {name!r} still wait in Kueue's queue {queue!r}; resize it again when they have been admitted"
        )


async def _forget_who_left(api: Api, owner: Manifest) -> None:
    """Have the Job not count the pods of before it was suspended, which have left by a signal, among its failures.

    It keeps an index's last pod until the next one is there, and would give up an index that has left a few times.
    """
    found, _ = await api.list("Pod", labels=names.selector(owner["metadata"]["name"]))
    left = [pod for pod in found if belongs(pod, owner) and is_leaving(pod)]
    await asyncio.gather(*(_let_go(api, pod) for pod in left))


async def _let_go(api: Api, pod: Manifest) -> None:
    others = [one for one in pod["metadata"].get("finalizers") or [] if one != names.TRACKED]
    version = pod["metadata"]["resourceVersion"]
    try:
        await api.patch(pod, {"metadata": {"finalizers": others, "resourceVersion": version}})
    except ClusterError as error:
        if error.status != 404:
            raise


async def _status(api: Api, owner: Manifest) -> JobStatus:
    name = owner["metadata"]["name"]
    pods, _ = await api.list("Pod", labels=names.selector(name))
    return await _status_by(api, owner, pods)


async def _status_by(api: Api, owner: Manifest, pods: builtins.list[Manifest]) -> JobStatus:
    pods = [pod for pod in pods if belongs(pod, owner)]
    events: list[Manifest] = []
    if lacks_pods(owner, pods):
        fields = f"involvedObject.uid={owner['metadata']['uid']},reason=FailedCreate"
        events, _ = await api.list("Event", fields=fields)
    of_pods: list[Manifest] = []
    if any(map(is_being_made, pods)):
        of_pods, _ = await api.list("Event", fields=EVENTS_OF_PODS)
    return job_status(owner, pods, time.time(), refusals(events, pods), delays(of_pods, pods))


async def _remove(api: Api, owner: Manifest) -> None:
    """Delete what the owner owns, down to the last pod, and keep the end of its log. Raises ConflictError.

    That a log can't be read or kept is no reason to fail: it is told.
    """
    name = owner["metadata"]["name"]
    kept: dict[int, deque[LogLine]] = defaultdict(lambda: deque(maxlen=archive.LINES_KEPT))

    opened = asyncio.Event()

    async def collect() -> None:
        async for line in _follow(api, owner, instance=None, last=archive.LINES_KEPT, opened=opened):
            kept[line.instance].append(line)

    collecting = asyncio.create_task(collect())
    opening = asyncio.create_task(opened.wait())
    try:
        await asyncio.wait([collecting, opening], timeout=LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
        await api.delete(owner, foreground=True, exactly=not is_leaving(owner))
        await _gone(api, owner)
        await asyncio.wait([collecting], timeout=LAST_WORDS_S)
    finally:
        for task in (collecting, opening):
            task.cancel()
        collected, _ = await asyncio.gather(collecting, opening, return_exceptions=True)
    if isinstance(collected, Exception):
        log.warning("log.not_kept", job=name, cause=str(collected))
        return
    lines = [line for _, of_one in sorted(kept.items()) for line in of_one]
    try:
        token = owner["metadata"]["annotations"].get(names.TOKEN, "")
        await archive.keep(api, name, lines, run=owner["metadata"]["uid"], owner=owner_of(token))
    except BackendError as error:
        log.warning("log.not_kept", job=name, cause=str(error))


async def _gone(api: Api, owner: Manifest) -> None:
    """Wait until the owner is not there any more."""
    name, uid = owner["metadata"]["name"], owner["metadata"]["uid"]
    async for objects in api.watch(owner["kind"], fields=f"metadata.name={name}"):
        if name not in objects or objects[name]["metadata"]["uid"] != uid:
            return


def _follow(
    api: Api, owner: Manifest, *, instance: int | None, last: int | None, opened: asyncio.Event | None = None
) -> AsyncGenerator[LogLine, None]:
    """Return what yields what the job's instances write until it has ended. `opened`: see `logs.follow`."""
    name, uid = owner["metadata"]["name"], owner["metadata"]["uid"]

    async def end_of_job() -> None:
        async for objects in api.watch(owner["kind"], fields=f"metadata.name={name}"):
            now = objects.get(name)
            if not now or now["metadata"]["uid"] != uid or has_ended(now):
                return

    seen: dict[str, int] = {}

    def numbers(pods: dict[str, Any]) -> dict[str, int]:
        """Return each pod's instance: a Job's index; of a pool the first number that no other has now."""
        mine = [pod for pod in pods.values() if belongs(pod, owner)]
        if owner["kind"] == "Job":
            return {pod["metadata"]["name"]: index_of(pod) for pod in mine}
        now = [pod["metadata"]["name"] for pod in pool_pods(mine)]
        for gone in seen.keys() - set(now):
            del seen[gone]
        for pod in now:
            free = (number for number in range(len(now)) if number not in seen.values())
            if pod not in seen:
                seen[pod] = next(free)
        return dict(seen)

    return logs.follow(
        api, names.selector(name), numbers=numbers, instance=instance, last=last, end_of_job=end_of_job, opened=opened
    )


def _numbered(owner: Manifest, pods: builtins.list[Manifest]) -> builtins.list[tuple[int, Mapping[str, Any]]]:
    """Return a job's pods by the instance that each is or was, an instance's oldest first."""
    mine = [pod for pod in pods if belongs(pod, owner)]
    if owner["kind"] == "Job":
        return sorted(((index_of(pod), pod) for pod in by_age(mine)), key=lambda each: each[0])
    return list(enumerate(pool_pods(mine)))


def _lines_of(kept: builtins.list[LogLine], instance: int | None, tail: int | None) -> builtins.list[LogLine]:
    of_each: dict[int, builtins.list[LogLine]] = defaultdict(builtins.list)
    for line in kept:
        if instance in (None, line.instance):
            of_each[line.instance].append(line)
    return [
        line for _, lines in sorted(of_each.items()) for line in (lines if tail is None else lines[-tail:] * bool(tail))
    ]


def _reference(owner: Manifest) -> Manifest:
    api_version = {"Job": "batch/v1", "Deployment": "apps/v1"}[owner["kind"]]
    return {
        "apiVersion": api_version,
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
