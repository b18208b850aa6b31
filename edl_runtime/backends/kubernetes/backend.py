"""The Kubernetes backend: jobs as pods."""

from __future__ import annotations

import asyncio
import builtins
import copy
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from edl_runtime.backends.errors import (
    ClusterError,
    ClusterUnavailableError,
    ConflictError,
    JobEndedError,
    JobReplacedError,
    SubmitError,
    UnknownJobError,
)
from edl_runtime.backends.interface import (
    MAX_REASON_LENGTH,
    Capacity,
    JobStatus,
    LogLine,
    Origin,
    check_owner,
    token_owner,
)
from edl_runtime.backends.kubernetes import capacity, log_archive, logs, manifests, names
from edl_runtime.backends.kubernetes.client import UNREADABLE, KubernetesClient, Manifest, Outage
from edl_runtime.backends.kubernetes.informer import (
    ByUid,
    Informer,
    KnownJob,
    status_of,
    status_or_why,
    uid_of_event,
)
from edl_runtime.backends.kubernetes.job_status import (
    bounds,
    desired_instances,
    is_queued,
    lacks_pods,
)
from edl_runtime.backends.kubernetes.kept_fields import read_owner, read_pod_of_job, read_workload
from edl_runtime.backends.kubernetes.leaving_nodes import pods_to_evict
from edl_runtime.backends.kubernetes.node_informer import NodeInformer
from edl_runtime.backends.kubernetes.pod_status import (
    POD_EVENT_SELECTOR,
    is_creating_containers,
    is_leaving,
)
from edl_runtime.backends.kubernetes.resize import Size, held_pods, is_resized_alone, release_pod, resize_owner
from edl_runtime.backends.kubernetes.rights import missing_rights, needed_rights
from edl_runtime.backends.kubernetes.workload_status import uid_of_queued
from edl_runtime.concurrency import SharedInLoop, all_completed
from edl_runtime.errors import BackendError, EdlError, SpecError, UnexpectedError, isolated
from edl_runtime.log import get_logger
from edl_runtime.pods import Pod
from edl_runtime.settings import KEPT_LOGS
from edl_runtime.specs import JobSpec, check_name

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

OWNERS = ("Job", "Deployment")
"""Kinds of trainer jobs and pools."""

MAX_LOG_STREAMS = 48
"""How many logs the followers of one event loop have open at a time, with the connections of their watches."""

MAX_PARALLEL_EVICTIONS = 16
"""How many pods are asked to leave at a time: a cloud may take hundreds of nodes away at once."""

NODES_WAIT_S = 10.0
"""How long to wait for what nodes say, without which jobs run all the same."""

LOG_COLLECT_TIMEOUT_S = 3.0
"""How long deletion waits for logs to open, and how long they are read after the last pod was deleted."""

_Watches = tuple[Informer, NodeInformer, asyncio.Semaphore]

log = get_logger(__name__)


class KubernetesBackend:
    """Runs jobs as pods in one namespace; see `edl_runtime.backends.interface.Backend`.

    `connect` opens a client of the cluster. `defaults`: the Pod of the connection. `kept_logs`: of how many deleted
    jobs of the namespace the ends of the logs are kept; 0 for none.

    Kubernetes restarts instances: those of a pool without limit, at most five minutes apart; those of a trainer job
    five times in all, and after disruptions as often as `Pod.disruptions` allows. When a trainer job grows, new indexes
    replace given-up ones. Logs of instances that left by a resize are only seen by followers; the end of deleted jobs'
    logs is kept in ConfigMaps.

    All methods raise ClusterUnavailableError and ClusterError.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[ApiClient]],
        *,
        namespace: str,
        defaults: Pod | None = None,
        kept_logs: int = KEPT_LOGS,
    ) -> None:
        self._connect = connect
        self._kept_logs = kept_logs
        self._namespace = namespace
        self._defaults = defaults or Pod()
        self._outage = Outage()
        self._refused: set[tuple[str, str]] = set()  # what was logged, by event and pod
        self._has_logged_nodes = False
        self._followed = SharedInLoop(self._watches, _close_watches)
        self._informer: Informer | None = None
        self._nodes: NodeInformer | None = None
        self._streams: asyncio.Semaphore | None = None

    @property
    def place(self) -> str:
        return self._namespace

    @asynccontextmanager
    async def following(self) -> AsyncIterator[KubernetesBackend]:
        """Yield a backend that reads and resizes by caches that watches keep up to date; see `Informer`.

        All contexts of one event loop share the watches; that of nodes begins with the first `evacuate` or `capacity`,
        those of others' pods with the latter. Changes made through the yielded backend are seen at once.
        """
        async with self._followed.use() as watches:
            informed = copy.copy(self)
            informed._informer, informed._nodes, informed._streams = watches  # noqa: SLF001 - a copy
            yield informed

    def _watches(self) -> _Watches:
        where = (self._connect, self._namespace, self._outage)
        return Informer(*where), NodeInformer(*where), asyncio.Semaphore(MAX_LOG_STREAMS)

    async def wait_for_change(self, since: int) -> int:
        """Wait until watches have reported more than `since` changes; return how many. Only in `following`."""
        if self._informer is None:
            raise RuntimeError("no watches: use the backend that `following` yields")
        return await self._informer.wait_for_change(since)

    async def submit(
        self,
        spec: JobSpec,
        *,
        token: str,
        secrets: Mapping[str, str],
        origin: Origin | None = None,
        owned_by: Manifest | None = None,
    ) -> JobStatus:
        """Get or create the job. If the caller dies meanwhile, the job has its token and no instances.

        `owned_by`: the object with which the cluster deletes the job.
        """
        manifest = manifests.job_manifest(
            spec, token=token, origin=origin, created_at=time.time(), defaults=self._defaults, owned_by=owned_by
        )
        async with self._api(changing=spec.name) as api:
            while True:
                owner = await _find_owner(api, spec.name)
                if owner is None:
                    await _rehearse(api, manifest, spec, keeps_log=self._kept_logs > 0)
                    if created := await _create(api, manifest, spec.name):
                        return status_of(KnownJob(await _start_or_delete(api, created, spec, secrets), []))
                    continue
                if is_leaving(owner):
                    await _wait_until_gone(api, owner)
                    continue
                status = await _status(api, owner)
                check_owner(status, token)
                try:
                    if status.digest == spec.digest and status.phase != "failed":
                        adopted = await api.annotate(owner, manifests.ownership(token, origin))
                        return await _status(api, await _start(api, adopted, spec, secrets))
                    await self._delete(api, owner)
                except ConflictError:  # it has changed since
                    continue
                manifest["metadata"]["annotations"][names.CREATED_AT] = repr(time.time())

    async def get(self, name: str) -> JobStatus:
        if self._informer:
            return await self._informer.get(name)
        async with self._api() as api:
            return await _status(api, await _existing_owner(api, name))

    async def list(self) -> builtins.list[JobStatus]:
        if self._informer:
            return await self._informer.list()
        async with self._api() as api:
            statuses = await _statuses(api, _known_jobs(*await _owners_and_pods(api)), status_or_why)
        return sorted(statuses, key=lambda status: status.name)

    async def resize(self, name: str, instances: int, *, token: str | None = None, reason: str = "") -> JobStatus:
        size = Size(instances, reason[:MAX_REASON_LENGTH])
        if self._informer and (resized := await self._resize_known(self._informer, name, size, token)):
            return status_of(resized)
        async with self._api(changing=name) as api:
            while True:
                owner = await _existing_owner(api, name)
                found = KnownJob(owner, await _pods(api, owner))
                try:
                    return status_of(await _resize(api, found, size, token))
                except ConflictError:
                    continue

    async def _resize_known(self, informer: Informer, name: str, size: Size, token: str | None) -> KnownJob | None:
        """Resize the job as the watches know it, by one request; None if that does not do, so that it must be read.

        The request holds for the known resourceVersion only. What the watches know may be out of date, so a refusal by
        that counts for nothing.
        """
        try:
            async with informer.using() as api:
                known = await informer.known(name)
                if not known or not is_resized_alone(known.owner, size.instances):
                    return None
                resized = await _resize(api, known, size, token)
                informer.await_change(name, resized.owner)
                return resized
        except ClusterUnavailableError:
            raise
        except (BackendError, SpecError):
            return None

    async def logs(
        self, name: str, *, instance: int | None = None, tail: int | None = None, follow: bool = False
    ) -> AsyncGenerator[LogLine, None]:
        if self._informer and follow:
            async with self._informer.using() as api:
                if known := await self._informer.known(name):
                    watch = logs.watch_known_job(self._informer, name)
                    following = logs.follow_job(
                        api, known.owner, watch, instance=instance, last=tail, streams=self._streams
                    )
                    async with aclosing(following) as lines:
                        async for line in lines:
                            yield line
                    return
        async with self._api() as api:
            owner = await _find_owner(api, name)
            if owner is None:
                archived = await self._archived_log(api, name)
                for line in logs.select_lines(archived.lines, instance, tail):
                    yield line
            elif follow:
                async with aclosing(
                    logs.follow_job(api, owner, logs.watch_job(api, owner), instance=instance, last=tail)
                ) as lines:
                    async for line in lines:
                        yield line
            else:
                pods, _ = await api.list("Pod", labels=names.selector(name))
                numbered = [
                    (number, pod) for number, pod in logs.pods_by_instance(owner, pods) if instance in (None, number)
                ]
                async for line in logs.read_logs(api, numbered, tail):
                    yield line

    async def owner(self, name: str) -> str:
        async with self._api() as api:
            if owner := await _find_owner(api, name):
                return token_owner(owner["metadata"]["annotations"].get(names.TOKEN, ""))
            return (await self._archived_log(api, name)).owner

    async def delete(self, name: str, *, token: str | None = None) -> bool:
        is_known = self._informer is not None and self._informer.has(name)  # other names may be no names of jobs
        async with self._api(changing=name if is_known else "") as api:
            while True:
                owner = await _find_owner(api, name)
                if owner is None or token not in (None, owner["metadata"]["annotations"].get(names.TOKEN)):
                    return False
                try:
                    await self._delete(api, owner)
                except ConflictError:
                    continue
                return True

    async def evacuate(self, jobs: Collection[str] | None = None) -> builtins.list[str]:
        """Evict our pods from nodes whose taints say that they go; see `Backend.evacuate`.

        Also lets those go that have left suspended jobs, see `release`. Needs cluster-role.yaml, to read nodes. What is
        refused, or can't be read of nodes, is only logged, once.
        """
        if self._informer and self._nodes:
            leaving = await self._if_readable(self._nodes.leaving())
            if jobs is None:
                found = _known_jobs(*await self._informer.objects())
            else:
                found = [job for name in jobs if (job := await self._informer.known(name))]
        else:
            async with self._api() as api:
                nodes = self._if_readable(_leaving_nodes(api))
                leaving, objects = await all_completed(nodes, _owners_and_pods(api))
            found = [job for job in _known_jobs(*objects) if jobs is None or job.owner["metadata"]["name"] in jobs]
        await self._release(_held_by(found))
        asked = pods_to_evict([pod for job in found for pod in job.pods], [job.owner for job in found], leaving)
        return await self._evict(asked) if asked else []

    async def _if_readable(self, leaving: Awaitable[dict[str, capacity.KnownNode]]) -> dict[str, capacity.KnownNode]:
        """Return the nodes that are about to go; none while nodes can't be read, whatever the server says."""
        try:
            async with asyncio.timeout(NODES_WAIT_S):
                with isolated("the nodes"):
                    return await leaving
        except (EdlError, TimeoutError) as error:
            if not self._has_logged_nodes:
                log.warning("nodes.not_read", cause=str(error) or f"no answer in {NODES_WAIT_S:g} s")
            self._has_logged_nodes = True
            return {}

    async def release(self, name: str) -> None:
        """Let the pods of a suspended job go that have left; see `held_pods`."""
        if self._informer:
            job = await self._informer.known(name)
        else:
            async with self._api() as api:
                owner = await _find_owner(api, name)
                job = KnownJob(owner, await _pods(api, owner)) if owner else None
        await self._release(held_pods(job.owner, job.pods) if job else [])

    async def _release(self, held: Collection[Manifest]) -> None:
        """Release pods. Another may do so at the same time."""
        if not held:
            return
        async with self._api() as api:
            done = await asyncio.gather(*(release_pod(api, pod) for pod in held), return_exceptions=True)
        for pod, error in zip(held, done, strict=True):
            if isinstance(error, ClusterError) and not isinstance(error, ConflictError):
                self._log_refused("pod.not_released", pod, error)
            elif error and not isinstance(error, BackendError):
                raise error

    async def _evict(self, asked: Iterable[tuple[Mapping[str, Any], str]]) -> builtins.list[str]:
        """Evict pods, and return the reasons of those that leave. While the server is away, the others are left out."""
        done: builtins.list[str] = []
        places = asyncio.Semaphore(MAX_PARALLEL_EVICTIONS)

        async def evict(api: KubernetesClient, pod: Mapping[str, Any], text: str) -> None:
            try:
                async with places:
                    if not await api.evict(pod):
                        return
            except ClusterError as error:
                self._log_refused("eviction.refused", pod, error)
                return
            log.info("pod.evicted", reason=text)
            done.append(text)
            if self._informer:
                self._informer.mark_stale(pod["metadata"]["labels"][names.JOB])

        async with self._api() as api:
            try:
                async with asyncio.TaskGroup() as evictions:
                    for pod, text in asked:
                        evictions.create_task(evict(api, pod, text))
            except* ClusterUnavailableError:
                log.info("evictions.interrupted", address=api.address)
        return done

    def _log_refused(self, event: str, pod: Mapping[str, Any], error: ClusterError) -> None:
        if (event, pod["metadata"]["uid"]) not in self._refused:
            log.warning(event, pod=pod["metadata"]["name"], cause=str(error))
            self._refused.add((event, pod["metadata"]["uid"]))

    async def capacity(self) -> Capacity:
        """Return the nodes' capacity and what the namespace's quota leaves.

        Without the right to list nodes, that is one node "quota of NAMESPACE", see `Capacity.only_node`. Raises
        BackendError if there is no quota either.
        """
        if self._informer and self._nodes:
            use = await self._nodes.read()
            owners, pods = await self._informer.objects()
        else:
            async with self._api() as api:
                (owners, pods), use = await all_completed(_owners_and_pods(api), _cluster_use(api))
        if found := capacity.cluster_capacity(use, pods, owners, self._namespace, time.time()):
            return found
        raise BackendError(
            f"the cluster's capacity is unknown: the namespace {self._namespace!r} has no ResourceQuota, and "
            f"{use.why}; grant the ClusterRole of deploy/cluster-role.yaml"
        )

    async def _archived_log(self, api: KubernetesClient, name: str) -> log_archive.ArchivedLog:
        """Return the log of a deleted job. Raises UnknownJobError."""
        with suppress(SpecError):
            check_name("name", name)
            if self._kept_logs and (archived := await log_archive.read_archived_log(api, name)):
                return archived
        raise await _unknown(api, name)

    async def _delete(self, api: KubernetesClient, owner: Manifest) -> None:
        await (_delete_with_logs(api, owner, self._kept_logs) if self._kept_logs else _delete(api, owner))

    @asynccontextmanager
    async def _api(self, *, changing: str = "") -> AsyncIterator[KubernetesClient]:
        async with self._connect() as client:
            yield KubernetesClient(client, self._namespace, outage=self._outage)
        if changing and self._informer:
            self._informer.mark_stale(changing)  # its watches may not have seen the change yet


async def _leaving_nodes(api: KubernetesClient) -> dict[str, capacity.KnownNode]:
    try:
        nodes = await api.list_all_namespaces("Node", capacity.read_known_node)
    except ClusterError as error:
        if error.status != 403:
            raise
        return {}
    return {node["node"].name: node["node"] for node in nodes if node["node"].leaving}


async def _cluster_use(api: KubernetesClient) -> capacity.ClusterUse:
    quotas, _ = await api.list("ResourceQuota")
    try:
        nodes, pods = await all_completed(
            api.list_all_namespaces("Node", capacity.read_known_node),
            api.list_all_namespaces("Pod", capacity.read_usage, fields=capacity.SCHEDULED_PODS),
        )
    except ClusterError as error:
        if error.status != 403:
            raise
        return capacity.ClusterUse(quotas=quotas, nodes=None, pods=[], why=str(error))
    return capacity.ClusterUse(
        quotas=quotas, nodes=[node["node"] for node in nodes], pods=[pod["usage"] for pod in pods]
    )


async def _resize(api: KubernetesClient, job: KnownJob, size: Size, token: str | None) -> KnownJob:
    """Return the job as changed. Raises ConflictError if it has changed since it was read."""
    owner, name = job.owner, job.owner["metadata"]["name"]
    status = status_of(job)
    if token not in (None, status.token):
        raise JobReplacedError(name)
    if is_leaving(owner) or status.has_ended:
        raise JobEndedError(name, "is ending" if is_leaving(owner) else f"has {status.phase}")
    bounds(owner).check_size(size.instances)
    return KnownJob(await resize_owner(api, owner, size, status, job.pods), job.pods)


async def _find_owner(api: KubernetesClient, name: str) -> Manifest | None:
    """Return our Job or Deployment of that name, None if there is none."""
    try:
        check_name("name", name)
    except SpecError:
        return None
    found = await all_completed(*(api.get(kind, name) for kind in OWNERS))
    return next((owner for owner in found if owner and names.is_job(owner["metadata"].get("labels") or {}, name)), None)


async def _existing_owner(api: KubernetesClient, name: str) -> Manifest:
    if owner := await _find_owner(api, name):
        return owner
    raise await _unknown(api, name)


async def _owners(api: KubernetesClient) -> list[Manifest]:
    """Return the Jobs and Deployments of all jobs."""
    found = await all_completed(*(api.list(kind, labels=names.selector(), read=read_owner) for kind in OWNERS))
    return [owner for owners, _ in found for owner in owners]


async def _owners_and_pods(api: KubernetesClient) -> tuple[list[Manifest], list[Manifest]]:
    """Return the objects of all jobs."""
    owners, (pods, _) = await all_completed(
        _owners(api), api.list("Pod", labels=names.selector(), read=read_pod_of_job)
    )
    return owners, pods


def _known_jobs(owners: Iterable[Manifest], pods: Iterable[Manifest]) -> list[KnownJob]:
    by_job: dict[str, list[Manifest]] = defaultdict(list)
    for pod in pods:
        by_job[pod["metadata"]["labels"][names.JOB]].append(pod)
    return [KnownJob(one, by_job[one["metadata"]["name"]]) for one in owners]


def _held_by(jobs: Iterable[KnownJob]) -> list[Manifest]:
    """Return the `held_pods` of these jobs. One whose objects nobody understands has none, and its status says why."""
    found: list[Manifest] = []
    for job in jobs:
        with suppress(UnexpectedError), isolated(f"job {job.owner['metadata']['name']!r}"):
            found += held_pods(job.owner, job.pods)
    return found


async def _unknown(api: KubernetesClient, name: str) -> UnknownJobError:
    return UnknownJobError(name, sorted(owner["metadata"]["name"] for owner in await _owners(api)))


async def _rehearse(api: KubernetesClient, manifest: Manifest, spec: JobSpec, *, keeps_log: bool) -> None:
    """Check that the job can be created, and resized, watched and deleted later. Raises SubmitError."""
    results = await asyncio.gather(
        api.create(manifest, dry_run=True),
        _check_rights(api, spec, keeps_log=keeps_log),
        *([_check_archive(api, spec.name)] if keeps_log else []),
        return_exceptions=True,
    )
    refused: list[ClusterError | SubmitError] = []
    for result in results:
        if isinstance(result, ConflictError):  # an object of that name exists by now; `_create` handles that
            continue
        if isinstance(result, ClusterError | SubmitError):
            refused.append(result)
        elif isinstance(result, BaseException):
            raise result
    if refused:
        reasons = [error.reason if isinstance(error, SubmitError) else str(error) for error in refused]
        raise SubmitError(
            spec.name, "; ".join(dict.fromkeys(reasons)), lacks_right=any(error.lacks_right for error in refused)
        )


async def _check_rights(api: KubernetesClient, spec: JobSpec, *, keeps_log: bool) -> None:
    """Raise SubmitError for rights that the job will need and this account lacks, as far as the cluster knows."""
    rules = await api.rules()
    missing = [] if rules is None else missing_rights(needed_rights(spec.kind, keeps_log=keeps_log), rules)
    if missing:
        which = ", ".join(
            f'cannot {verb} resource "{resource}" in API group "{group}"' for group, resource, verb in missing
        )
        error = ClusterError(403, "Forbidden", f'this account {which} in the namespace "{api.namespace}"')
        raise SubmitError(spec.name, str(error), lacks_right=True)


async def _check_archive(api: KubernetesClient, name: str) -> None:
    """Raise SubmitError if the end of the job's log could not be kept, as its ConfigMap's name is taken."""
    archive = log_archive.archive_manifest(name)
    there = await api.get("ConfigMap", archive["metadata"]["name"], metadata_only=True)
    if there and not names.is_of(there["metadata"].get("labels") or {}, name):
        raise _name_taken(archive, name)


async def _create(api: KubernetesClient, manifest: Manifest, name: str) -> Manifest | None:
    """Create the job; None if another client has just created it. Raises SubmitError."""
    try:
        return await api.create(manifest)
    except ConflictError as error:
        if await _find_owner(api, name):
            return None
        raise _name_taken(manifest, name) from error
    except ClusterError as error:
        raise SubmitError(name, str(error), lacks_right=error.lacks_right) from error


async def _start_or_delete(
    api: KubernetesClient, created: Manifest, spec: JobSpec, secrets: Mapping[str, str]
) -> Manifest:
    """Start a job that was just created, and return it; delete it again if something that it needs is refused.

    Raises SubmitError.
    """
    try:
        return await _start(api, created, spec, secrets)
    except (ClusterError, SubmitError) as error:
        await _delete_unstarted(api, created)
        if isinstance(error, SubmitError):
            raise
        raise SubmitError(spec.name, str(error), lacks_right=error.lacks_right) from error


async def _delete_unstarted(api: KubernetesClient, created: Manifest) -> None:
    """Delete a job that this call has created, unless another has adopted or started it."""
    owner: Manifest | None = created
    while owner and owner["metadata"]["uid"] == created["metadata"]["uid"]:
        annotations = owner["metadata"]["annotations"]
        if names.STARTED in annotations or annotations[names.TOKEN] != created["metadata"]["annotations"][names.TOKEN]:
            return
        with suppress(ConflictError):  # as its controller has written its status
            await api.delete(owner, exactly=True)
            return
        owner = await api.get(created["kind"], created["metadata"]["name"])


async def _start(api: KubernetesClient, owner: Manifest, spec: JobSpec, secrets: Mapping[str, str]) -> Manifest:
    """Create the job's other objects and start it, unless that was done before; return its Job or Deployment."""
    owned = _owned_manifests(spec, secrets)
    for manifest in owned:
        manifest["metadata"]["ownerReferences"] = [manifests.owner_reference(owner)]
    await asyncio.gather(*(_create_or_apply(api, manifest, spec.name) for manifest in owned))
    while names.STARTED not in owner["metadata"]["annotations"]:
        queued = names.QUEUE in owner["metadata"]["labels"]  # then Kueue starts it
        suspend = {} if queued else {"suspend": desired_instances(owner) == 0}
        begin = {"replicas": desired_instances(owner)} if owner["kind"] == "Deployment" else suspend
        same = (names.WANTED, names.TOKEN)
        try:
            owner = await api.set_if_same(owner, {names.STARTED: "true"}, begin, same=same)
        except ConflictError:
            owner = await api.get(owner["kind"], spec.name) or owner
    return owner


async def _create_or_apply(api: KubernetesClient, manifest: Manifest, job: str) -> None:
    """Create or update an object of a job. Raises SubmitError if one of its name is not ours."""
    while True:
        with suppress(ConflictError):
            await api.create(manifest)
            return
        there = await _existing_metadata(api, manifest, job)
        if there is None:  # another client was faster
            continue
        with suppress(ConflictError):
            await api.apply(manifest, over=there)
            return


async def _existing_metadata(api: KubernetesClient, manifest: Manifest, job: str) -> Manifest | None:
    """Return the metadata of the existing object, None if there is none. Raises SubmitError if it isn't the job's."""
    there = await api.metadata(manifest)
    labels = (there or {}).get("labels") or {}
    if there is None or names.is_of(labels, job):
        return there
    raise _name_taken(manifest, job)


def _name_taken(manifest: Manifest, job: str) -> SubmitError:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    return SubmitError(job, f"the {kind} {name!r} exists and is not ours; give the job another name, or delete it")


def _owned_manifests(spec: JobSpec, secrets: Mapping[str, str]) -> list[Manifest]:
    return [
        manifests.secret_manifest(spec, secrets),
        *([manifests.disruption_budget_manifest(spec)] if spec.kind == "pool" else []),
    ]


async def _status(api: KubernetesClient, owner: Manifest) -> JobStatus:
    (status,) = await _statuses(api, [KnownJob(owner, await _pods(api, owner))], status_of)
    return status


async def _pods(api: KubernetesClient, owner: Manifest) -> builtins.list[Manifest]:
    pods, _ = await api.list("Pod", labels=names.selector(owner["metadata"]["name"]), read=read_pod_of_job)
    return pods


async def _statuses(
    api: KubernetesClient, jobs: builtins.list[KnownJob], status: Callable[[KnownJob, ByUid, ByUid, ByUid], JobStatus]
) -> builtins.list[JobStatus]:
    """Return the statuses of jobs; events and Workloads are only listed if they may explain one, once for all jobs."""
    only = f"involvedObject.uid={jobs[0].owner['metadata']['uid']}" if len(jobs) == 1 else "involvedObject.kind=Job"
    refused = _by_uid(
        (await api.list("Event", fields=f"{only},reason=FailedCreate"))[0]
        if any(lacks_pods(job.owner, job.pods) for job in jobs)
        else [],
        uid_of_event,
    )
    delayed = _by_uid(
        (await api.list("Event", fields=POD_EVENT_SELECTOR))[0]
        if any(is_creating_containers(pod) for job in jobs for pod in job.pods)
        else [],
        uid_of_event,
    )
    queued = _by_uid(
        await _workloads(api) if any(is_queued(job.owner, job.pods) for job in jobs) else [], uid_of_queued
    )
    return [status(job, refused, delayed, queued) for job in jobs]


async def _workloads(api: KubernetesClient) -> builtins.list[Manifest]:
    """Return Kueue's Workloads; none without Kueue, without the right to list them, or while nobody converts them."""
    try:
        return (await api.list("Workload", read=read_workload, is_retried=False))[0]
    except ClusterUnavailableError:
        return []
    except ClusterError as error:
        if error.status not in UNREADABLE:
            raise
        return []


async def _close_watches(watches: _Watches) -> None:
    informer, nodes, _ = watches
    await asyncio.gather(informer.close(), nodes.close())


def _by_uid(things: builtins.list[Manifest], uid_of: Callable[[Manifest], str]) -> ByUid:
    found: dict[str, builtins.list[Manifest]] = defaultdict(list)
    for thing in things:
        found[uid_of(thing)].append(thing)
    return lambda uid: found.get(uid, [])


async def _delete(api: KubernetesClient, owner: Manifest) -> None:
    """Delete the job, down to its last pod. Raises ConflictError."""
    await api.delete(owner, foreground=True, exactly=not is_leaving(owner))
    await _wait_until_gone(api, owner)


async def _delete_with_logs(api: KubernetesClient, owner: Manifest, kept_logs: int) -> None:
    """As `_delete`, and archive the end of the job's log.

    A log that can't be read or archived is only logged as a warning.
    """
    name = owner["metadata"]["name"]
    kept: dict[int, deque[LogLine]] = defaultdict(lambda: deque(maxlen=log_archive.MAX_LINES))

    opened, gone = asyncio.Event(), asyncio.Event()

    async def collect() -> None:
        following = logs.follow_job(
            api, owner, logs.watch_job(api, owner), instance=None, last=log_archive.MAX_LINES, opened=opened, gone=gone
        )
        async for line in following:
            kept[line.instance].append(line)

    collecting = asyncio.create_task(collect())
    opening = asyncio.create_task(opened.wait())
    try:
        # a log is deleted with its pod, so it must be open before
        await asyncio.wait([collecting, opening], timeout=LOG_COLLECT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        await _delete(api, owner)
        gone.set()
        await asyncio.wait([collecting], timeout=LOG_COLLECT_TIMEOUT_S)
    finally:
        for task in (collecting, opening):
            task.cancel()
        collected, _ = await asyncio.gather(collecting, opening, return_exceptions=True)
    if isinstance(collected, Exception):
        log.warning("log.archive_failed", job=name, cause=str(collected))
        return
    lines = [line for _, of_one in sorted(kept.items()) for line in of_one]
    try:
        token = owner["metadata"]["annotations"].get(names.TOKEN, "")
        await log_archive.archive_log(
            api, name, lines, run=owner["metadata"]["uid"], owner=token_owner(token), most=kept_logs
        )
    except BackendError as error:
        log.warning("log.archive_failed", job=name, cause=str(error))


async def _wait_until_gone(api: KubernetesClient, owner: Manifest) -> None:
    name, uid = owner["metadata"]["name"], owner["metadata"]["uid"]
    async for objects in api.watch(owner["kind"], fields=f"metadata.name={name}"):
        if name not in objects or objects[name]["metadata"]["uid"] != uid:
            return
