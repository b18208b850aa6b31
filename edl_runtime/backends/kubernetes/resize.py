"""Resizes a Job or Deployment, and checks whether Kueue allows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from edl_runtime.backends.errors import ClusterError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.kubernetes import manifests, names
from edl_runtime.backends.kubernetes.client import KubernetesClient, Manifest
from edl_runtime.backends.kubernetes.job_status import (
    bounds,
    completions_for,
    desired_instances,
    failed_indexes,
    is_felt_when_suspended,
    pool_instances,
    pool_pods,
)
from edl_runtime.backends.kubernetes.pod_status import (
    index_of,
    is_gated_by_queue,
    is_leaving,
    is_pod_of,
    pod_has_ended,
)
from edl_runtime.errors import BackendError, counted


class Size(NamedTuple):
    """How many `instances` a job is to have, and why."""

    instances: int
    reason: str = ""


def is_resized_alone(owner: Manifest, instances: int) -> bool:
    """Whether a resize depends on this Job alone, and on none of its pods: a running one, not in a queue.

    Its resourceVersion then proves that it is as it was when the size was decided.
    """
    is_running = owner["kind"] == "Job" and instances > 0 and desired_instances(owner) > 0
    return is_running and names.QUEUE not in owner["metadata"]["labels"]


async def resize_owner(
    api: KubernetesClient, owner: Manifest, size: Size, before: JobStatus, pods: Sequence[Manifest]
) -> Manifest:
    """Record the size, and change the Job or Deployment; return it. `before`, `pods`: the job's, just read.

    Raises ConflictError if the owner has changed since, and BackendError for what Kueue would undo.
    """
    instances = size.instances
    record = {names.WANTED: str(instances), names.RESIZED_FOR: size.reason}
    if instances != desired_instances(owner) and (instances or is_felt_when_suspended(before)):
        record[names.RESIZED_AT] = repr(time.time())
    if owner["kind"] == "Job":
        return await _resize_job(api, owner, instances, record, pods)
    there = pool_pods(pods)
    seen = {one.status.pod: one.status for one in pool_instances(there, time.time())}
    costs = {pod: {"annotations": {names.DELETION_COST: str(-status.index)}} for pod, status in seen.items()}
    if 0 < instances < len(seen):  # the highest index leaves first
        unmarked = [pod for pod in there if not _has(pod, costs[pod["metadata"]["name"]]["annotations"])]
        await asyncio.gather(*(api.patch(pod, {"metadata": costs[pod["metadata"]["name"]]}) for pod in unmarked))
    resized = await api.set_if_same(owner, record, {"replicas": instances}, same=(names.WANTED, names.TOKEN))
    if instances > desired_instances(owner):  # replace those that had been given up
        given_up = [pod for pod in there if seen[pod["metadata"]["name"]].given_up]
        await asyncio.gather(*(api.delete(pod) for pod in given_up))
    return resized


def _has(pod: Mapping[str, Any], annotations: Mapping[str, str]) -> bool:
    return annotations.items() <= (pod["metadata"].get("annotations") or {}).items()


async def _resize_job(
    api: KubernetesClient, owner: Manifest, instances: int, record: Mapping[str, str], pods: Sequence[Manifest]
) -> Manifest:
    """Change the number of a Job's indexes, or suspend it for 0.

    `submit` starts a Job that is not started yet, and Kueue one in its queue. Raises BackendError for what Kueue would
    undo, or stop the job for.
    """
    queue = owner["metadata"]["labels"].get(names.QUEUE)
    started_elsewhere = names.STARTED not in owner["metadata"]["annotations"] or queue is not None
    if queue is not None:
        _check_queue(owner, queue, instances, pods)
    if instances == 0:
        return await api.annotate(owner, record, {"suspend": True})
    if desired_instances(owner) == 0:
        await _release_suspended_pods(api, owner, pods)
    completions = completions_for(owner, instances)
    elastic = owner["metadata"]["annotations"].get(names.ELASTIC) == "true"
    spec = {
        "parallelism": completions,
        "completions": completions,
        "maxFailedIndexes": manifests.max_failed_indexes(completions, bounds(owner), elastic=elastic),
        **({} if started_elsewhere else {"suspend": False}),
    }
    return await api.annotate(owner, record, spec)


def _check_queue(owner: Manifest, queue: str, instances: int, pods: Sequence[Manifest]) -> None:
    """Raise BackendError if Kueue would not let the Job have so many instances.

    Kueue stops a running Job whose size changes, unless it was created as an elastic one; and if a Job grows again
    before its last growth was admitted, Kueue may admit the wrong pods (kubernetes-sigs/kueue#14580).
    """
    name = owner["metadata"]["name"]
    if instances == 0:
        raise BackendError(f"{name!r} is in Kueue's queue {queue!r}: only Kueue may suspend it")
    if owner["spec"].get("suspend") or instances == desired_instances(owner):
        return
    if not is_gated_by_queue(owner["spec"]["template"]):
        raise BackendError(
            f"Kueue would stop {name!r}, in its queue {queue!r}, if its size changed: resizing needs a job submitted "
            "under Kueue 0.18, or 0.13 with the feature gate ElasticJobsViaWorkloadSlices"
        )
    if instances < desired_instances(owner):
        return
    admitted = {index_of(pod) for pod in pods if is_pod_of(pod, owner) and not is_gated_by_queue(pod)}
    waiting = set(range(owner["spec"]["completions"])) - admitted - set(failed_indexes(owner))
    if waiting:
        raise BackendError(
            f"Kueue's queue {queue!r} has yet to admit {counted(len(waiting), 'pod')} of {name!r}; resize it after that"
        )


def held_pods(owner: Manifest, pods: Iterable[Manifest]) -> list[Manifest]:
    """Return the pods that have left a suspended Job and are held by its finalizer, which `release_pod` removes.

    Kubernetes' Job controller keeps them until the Job resumes, and `kubectl drain` waits until they are gone.
    """
    if owner["kind"] != "Job" or desired_instances(owner):
        return []
    left = [pod for pod in pods if is_pod_of(pod, owner) and is_leaving(pod) and pod_has_ended(pod)]
    return [pod for pod in left if names.TRACKED in (pod["metadata"].get("finalizers") or ())]


async def _release_suspended_pods(api: KubernetesClient, owner: Manifest, pods: Sequence[Manifest]) -> None:
    """Remove the Job's finalizer from pods that left when it was suspended, so that it does not count them as failed.

    They ended by a signal, and a Job gives up an index that has failed a few times.
    """
    left = [pod for pod in pods if is_pod_of(pod, owner) and is_leaving(pod)]
    await asyncio.gather(*(release_pod(api, pod) for pod in left))


async def release_pod(api: KubernetesClient, pod: Mapping[str, Any]) -> None:
    """Remove the Job's finalizer from a pod, if that is there still. Raises ConflictError if it has changed since."""
    others = [one for one in pod["metadata"].get("finalizers") or [] if one != names.TRACKED]
    version = pod["metadata"]["resourceVersion"]
    try:
        await api.patch(pod, {"metadata": {"finalizers": others, "resourceVersion": version}})
    except ClusterError as error:
        if error.status != 404:
            raise
