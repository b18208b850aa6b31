"""The Kubernetes backend: jobs as pods."""

from __future__ import annotations

import asyncio
import builtins
import copy
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from edl_runtime.backends.errors import (
    ClusterError,
    ConflictError,
    JobEndedError,
    JobReplacedError,
    SubmitError,
    UnknownJobError,
)
from edl_runtime.backends.interface import Capacity, JobStatus, LogLine, check_owner, token_owner
from edl_runtime.backends.kubernetes import capacity, log_archive, logs, manifests, names
from edl_runtime.backends.kubernetes.client import KubernetesClient, Manifest, Outage
from edl_runtime.backends.kubernetes.informer import Informer
from edl_runtime.backends.kubernetes.job_status import (
    bounds,
    desired_instances,
    job_status,
    lacks_pods,
    refusals,
)
from edl_runtime.backends.kubernetes.pod_status import (
    POD_EVENT_SELECTOR,
    is_creating_containers,
    is_leaving,
    is_pod_of,
    start_delays,
)
from edl_runtime.backends.kubernetes.resize import resize_owner
from edl_runtime.errors import BackendError, SpecError
from edl_runtime.log import get_logger
from edl_runtime.pods import Pod
from edl_runtime.specs import JobSpec, check_name

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

_SCHEDULED_PODS = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of pods that use resources of a node."""

OWNERS = ("Job", "Deployment")
"""Kinds of trainer jobs and pools."""

LOG_COLLECT_TIMEOUT_S = 3.0
"""How long deletion waits for logs to open, and how long they are read after the last pod was deleted."""

log = get_logger(__name__)


class KubernetesBackend:
    """Runs jobs as pods in one namespace; see `edl_runtime.backends.interface.Backend`.

    `connect` opens a client of the cluster. `defaults`: the Pod of the connection.

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
    ) -> None:
        self._connect = connect
        self._namespace = namespace
        self._defaults = defaults or Pod()
        self._outage = Outage()
        self._informers: dict[asyncio.AbstractEventLoop, tuple[Informer, set[object]]] = {}
        self._informer: Informer | None = None

    @asynccontextmanager
    async def following(self) -> AsyncIterator[KubernetesBackend]:
        """Yield a backend whose `get` and `list` read a cache that watches keep up to date; see `Informer`.

        All contexts of one event loop share the watches. Changes made through the yielded backend are seen at once.
        """
        loop, user = asyncio.get_running_loop(), object()
        informer, users = self._informers.setdefault(
            loop, (Informer(self._connect, self._namespace, self._outage), set())
        )
        users.add(user)
        try:
            informed = copy.copy(self)
            informed._informer = informer  # noqa: SLF001 - a copy of this backend
            yield informed
        finally:
            users.remove(user)
            if not users:
                del self._informers[loop]
                await informer.close()

    async def wait_for_change(self, since: int) -> int:
        """Wait until watches have reported more than `since` changes; return how many. Only in `following`."""
        if self._informer is None:
            raise RuntimeError("no watches: use the backend that `following` yields")
        return await self._informer.wait_for_change(since)

    async def submit(
        self, spec: JobSpec, *, token: str, secrets: Mapping[str, str], owned_by: Manifest | None = None
    ) -> JobStatus:
        """Get or create the job. If the caller dies meanwhile, the job has its token and no instances.

        `owned_by`: the object with which the cluster deletes the job.
        """
        manifest = manifests.job_manifest(
            spec, token=token, created_at=time.time(), defaults=self._defaults, owned_by=owned_by
        )
        async with self._api(changing=spec.name) as api:
            while True:
                owner = await _find_owner(api, spec.name)
                if owner is None:
                    await _dry_run(api, manifest, spec)
                    if created := await _create(api, manifest, spec.name):
                        return await _start(api, created, spec, secrets)
                    continue
                if is_leaving(owner):
                    await _wait_until_gone(api, owner)
                    continue
                status = await _status(api, owner)
                check_owner(status, token)
                try:
                    if status.digest == spec.digest and status.phase != "failed":
                        adopted = await api.annotate(owner, {names.TOKEN: token})
                        return await _start(api, adopted, spec, secrets)
                    await _delete_with_logs(api, owner)
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
            owners, (pods, _) = await asyncio.gather(_owners(api), api.list("Pod", labels=names.selector()))
            by_job: dict[str, list[Manifest]] = defaultdict(list)
            for pod in pods:
                by_job[pod["metadata"]["labels"][names.JOB]].append(pod)
            statuses = await asyncio.gather(
                *(_status_of_pods(api, owner, by_job[owner["metadata"]["name"]]) for owner in owners)
            )
        return sorted(statuses, key=lambda status: status.name)

    async def resize(self, name: str, instances: int, *, token: str | None = None) -> JobStatus:
        async with self._api(changing=name) as api:
            while True:
                owner = await _existing_owner(api, name)
                status = await _status(api, owner)
                if token not in (None, status.token):
                    raise JobReplacedError(name)
                if is_leaving(owner) or status.has_ended:
                    ended = "is ending" if is_leaving(owner) else f"has {status.phase}"
                    raise JobEndedError(name, ended)
                bounds(owner).check_size(instances)
                try:
                    return await _status(api, await resize_owner(api, owner, instances, status))
                except ConflictError:
                    continue

    async def logs(
        self, name: str, *, instance: int | None = None, tail: int | None = None, follow: bool = False
    ) -> AsyncGenerator[LogLine, None]:
        async with self._api() as api:
            owner = await _find_owner(api, name)
            if owner is None:
                archived = await _archived_log(api, name)
                for line in logs.select_lines(archived.lines, instance, tail):
                    yield line
            elif follow:
                async with aclosing(logs.follow_job(api, owner, instance=instance, last=tail)) as lines:
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
            return (await _archived_log(api, name)).owner

    async def delete(self, name: str, *, token: str | None = None) -> bool:
        is_known = self._informer is not None and self._informer.has(name)  # other names may be no names of jobs
        async with self._api(changing=name if is_known else "") as api:
            while True:
                owner = await _find_owner(api, name)
                if owner is None or token not in (None, owner["metadata"]["annotations"].get(names.TOKEN)):
                    return False
                try:
                    await _delete_with_logs(api, owner)
                except ConflictError:
                    continue
                return True

    async def capacity(self) -> Capacity:
        """Return the nodes' capacity and what the namespace's quota leaves.

        Without the right to list nodes, that is one node "quota of NAMESPACE", see `Capacity.only_node`. Raises
        BackendError if there is no quota either.
        """
        async with self._api() as api:
            (quotas, _), (ours, _), owners = await asyncio.gather(
                api.list("ResourceQuota"), api.list("Pod", labels=names.selector()), _owners(api)
            )
            try:
                nodes, others = await asyncio.gather(
                    api.list_all_namespaces("Node", capacity.trim_node),
                    api.list_all_namespaces("Pod", capacity.pod_usage, fields=_SCHEDULED_PODS),
                )
            except ClusterError as error:
                if error.status != 403:
                    raise
                on_nodes, why = None, str(error)
            else:
                on_nodes, why = (nodes, others), ""
        gone = capacity.leaving_pods(ours, owners)
        total, left = capacity.quota_capacity(quotas, ours, gone)
        by_node = capacity.node_capacities(*on_nodes, gone) if on_nodes else None
        if found := capacity.combine(by_node, total, left, self._namespace):
            return found
        raise BackendError(
            f"the cluster's capacity is unknown: the namespace {self._namespace!r} has no ResourceQuota, and {why}; "
            "grant the ClusterRole of deploy/cluster-role.yaml"
        )

    @asynccontextmanager
    async def _api(self, *, changing: str = "") -> AsyncIterator[KubernetesClient]:
        async with self._connect() as client:
            yield KubernetesClient(client, self._namespace, outage=self._outage)
        if changing and self._informer:
            self._informer.mark_stale(changing)  # its watches may not have seen the change yet


async def _find_owner(api: KubernetesClient, name: str) -> Manifest | None:
    """Return our Job or Deployment of that name, None if there is none."""
    try:
        check_name("name", name)
    except SpecError:
        return None
    return next(iter(await _owners(api, name)), None)


async def _existing_owner(api: KubernetesClient, name: str) -> Manifest:
    if owner := await _find_owner(api, name):
        return owner
    raise await _unknown(api, name)


async def _owners(api: KubernetesClient, name: str = "") -> list[Manifest]:
    """Return the Job or Deployment of that name, or of all jobs."""
    found = await asyncio.gather(*(api.list(kind, labels=names.selector(name)) for kind in OWNERS))
    return [owner for owners, _ in found for owner in owners]


async def _unknown(api: KubernetesClient, name: str) -> UnknownJobError:
    return UnknownJobError(name, sorted(owner["metadata"]["name"] for owner in await _owners(api)))


async def _archived_log(api: KubernetesClient, name: str) -> log_archive.ArchivedLog:
    """Return the log of a deleted job. Raises UnknownJobError."""
    with suppress(SpecError):
        if archived := await log_archive.read_archived_log(api, check_name("name", name)):
            return archived
    raise await _unknown(api, name)


async def _dry_run(api: KubernetesClient, manifest: Manifest, spec: JobSpec) -> None:
    """Check by dry runs that the job can be created, and resized, watched and deleted later. Raises SubmitError."""
    owned = _owned_manifests(spec, {})
    results = await asyncio.gather(
        # metadata are read by a dry-run PATCH, which also shows that the job may be resized
        *(
            _existing_metadata(api, one, spec.name)
            for one in (manifest, *owned, log_archive.archive_manifest(spec.name))
        ),
        api.create(manifest, dry_run=True),
        *(api.apply(one, dry_run=True) for one in owned),
        api.list("Pod", labels=names.selector(spec.name)),
        api.list("Event", fields=f"involvedObject.name={spec.name}"),
        api.get(manifest["kind"], spec.name),
        api.dry_run_delete(manifest),
        api.dry_run_watch(manifest["kind"]),
        *(_dry_run_shrinking(api, spec.name) if spec.kind == "pool" else ()),
        return_exceptions=True,
    )
    errors = [error for error in results if isinstance(error, BaseException)]
    for error in errors:
        if not isinstance(error, ClusterError | SubmitError):
            raise error
    # a conflict means that another client has created the job; `_create` handles that
    refused = [error for error in errors if not isinstance(error, ConflictError)]
    if refused:
        reasons = [error.reason if isinstance(error, SubmitError) else str(error) for error in refused]
        raise SubmitError(spec.name, "; ".join(dict.fromkeys(reasons)))


def _dry_run_shrinking(api: KubernetesClient, name: str) -> builtins.list[Awaitable[object]]:
    """Check that pods of a pool may be patched and deleted, with a name that none of them has."""
    pod = {"kind": "Pod", "metadata": {"name": name}}
    return [api.metadata(pod), api.dry_run_delete(pod)]


async def _create(api: KubernetesClient, manifest: Manifest, name: str) -> Manifest | None:
    """Create the job; None if another client has just created it. Raises SubmitError."""
    try:
        return await api.create(manifest)
    except ConflictError as error:
        if await _find_owner(api, name):
            return None
        raise _name_taken(manifest, name) from error
    except ClusterError as error:
        raise SubmitError(name, str(error)) from error


async def _start(api: KubernetesClient, owner: Manifest, spec: JobSpec, secrets: Mapping[str, str]) -> JobStatus:
    """Create the job's other objects and start it, unless that was done before."""
    owned = _owned_manifests(spec, secrets)
    for manifest in owned:
        manifest["metadata"]["ownerReferences"] = [manifests.owner_reference(owner)]
    await asyncio.gather(*(_create_or_apply(api, manifest, spec.name) for manifest in owned))
    while names.STARTED not in owner["metadata"]["annotations"]:
        queued = names.QUEUE in owner["metadata"]["labels"]  # then Kueue starts it
        suspend = {} if queued else {"suspend": desired_instances(owner) == 0}
        begin = {"replicas": desired_instances(owner)} if owner["kind"] == "Deployment" else suspend
        try:
            owner = await api.annotate(owner, {names.STARTED: "true"}, begin)
        except ConflictError:
            owner = await api.get(owner["kind"], spec.name) or owner
    return await _status(api, owner)


async def _create_or_apply(api: KubernetesClient, manifest: Manifest, job: str) -> None:
    """Create or update an object of a job. Raises SubmitError if one of its name is not ours."""
    while True:
        there = await _existing_metadata(api, manifest, job)
        try:
            if there is None:
                await api.create(manifest)
            else:
                await api.apply(manifest, over=there)
        except ConflictError:  # another client was faster
            continue
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
    name = owner["metadata"]["name"]
    pods, _ = await api.list("Pod", labels=names.selector(name))
    return await _status_of_pods(api, owner, pods)


async def _status_of_pods(api: KubernetesClient, owner: Manifest, pods: builtins.list[Manifest]) -> JobStatus:
    pods = [pod for pod in pods if is_pod_of(pod, owner)]
    events: list[Manifest] = []
    if lacks_pods(owner, pods):
        fields = f"involvedObject.uid={owner['metadata']['uid']},reason=FailedCreate"
        events, _ = await api.list("Event", fields=fields)
    of_pods: list[Manifest] = []
    if any(map(is_creating_containers, pods)):
        of_pods, _ = await api.list("Event", fields=POD_EVENT_SELECTOR)
    return job_status(owner, pods, time.time(), refusals(events, pods), start_delays(of_pods, pods))


async def _delete_with_logs(api: KubernetesClient, owner: Manifest) -> None:
    """Delete the job, down to its last pod, and archive the end of its log. Raises ConflictError.

    A log that can't be read or archived is only logged as a warning.
    """
    name = owner["metadata"]["name"]
    kept: dict[int, deque[LogLine]] = defaultdict(lambda: deque(maxlen=log_archive.MAX_LINES))

    opened = asyncio.Event()

    async def collect() -> None:
        async for line in logs.follow_job(api, owner, instance=None, last=log_archive.MAX_LINES, opened=opened):
            kept[line.instance].append(line)

    collecting = asyncio.create_task(collect())
    opening = asyncio.create_task(opened.wait())
    try:
        # a log is deleted with its pod, so it must be open before
        await asyncio.wait([collecting, opening], timeout=LOG_COLLECT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        await api.delete(owner, foreground=True, exactly=not is_leaving(owner))
        await _wait_until_gone(api, owner)
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
        await log_archive.archive_log(api, name, lines, run=owner["metadata"]["uid"], owner=token_owner(token))
    except BackendError as error:
        log.warning("log.archive_failed", job=name, cause=str(error))


async def _wait_until_gone(api: KubernetesClient, owner: Manifest) -> None:
    name, uid = owner["metadata"]["name"], owner["metadata"]["uid"]
    async for objects in api.watch(owner["kind"], fields=f"metadata.name={name}"):
        if name not in objects or objects[name]["metadata"]["uid"] != uid:
            return
