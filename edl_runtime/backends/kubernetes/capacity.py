"""Capacity of a cluster for instances, by its nodes and the namespace's quotas. Pure."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from edl_runtime.backends.interface import Capacity, NodeCapacity
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.job_status import pool_pods
from edl_runtime.backends.kubernetes.kept_fields import EVICTED_AFTER_S, read_node, read_pod
from edl_runtime.backends.kubernetes.leaving_nodes import leaving_reason
from edl_runtime.backends.kubernetes.pod_status import index_of, is_leaving, pod_has_ended, unix_time
from edl_runtime.backends.kubernetes.pod_template import mapping_at, mappings_at
from edl_runtime.pods import PODS, Manifest, amount, reserved_resources, resource_name

_LIMITED = {
    "cpu": "cpu", "requests.cpu": "cpu",
    "memory": "memory", "requests.memory": "memory", "limits.memory": "memory",
    "ephemeral-storage": "ephemeral-storage", "requests.ephemeral-storage": "ephemeral-storage",
    "pods": PODS, "count/pods": PODS,
}  # fmt: skip
"""Resources by the names of quotas. Instances' memory requests are also their limits."""


_UNREADY_KEYS = (None, "", "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Keys of tolerations of a node that is not ready."""

_UNREADY_TAINT = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
"""Kubernetes puts it, or its like, on a node that is not ready, a moment later."""

_IDENTITY = ("name", "namespace", "uid", "resourceVersion")

SCHEDULED_PODS = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of pods that use resources of a node."""


class PodUsage(msgspec.Struct, frozen=True):
    """What a pod reserves of its node: nothing, and no node, if it is not scheduled, ended or leaving."""

    uid: str
    node: str = ""
    resources: dict[str, float] = {}


class KnownNode(msgspec.Struct, frozen=True):
    """What is kept of a node. `unready_since`: Unix time, None while it is ready. `leaving`: see `leaving_reason`."""

    name: str
    allocatable: dict[str, float]
    cordoned: bool
    unready_since: float | None
    labels: dict[str, str]
    taints: tuple[dict[str, str], ...]
    leaving: str


class ClusterUse(msgspec.Struct, frozen=True, kw_only=True):
    """The quotas of a namespace, and the nodes with what all pods use of them.

    `nodes`: None if we may not read them or the pods; `why` not.
    """

    quotas: Sequence[Manifest]
    nodes: Sequence[KnownNode] | None
    pods: Sequence[PodUsage]
    why: str = ""


def cluster_capacity(
    use: ClusterUse, pods: Sequence[Manifest], owners: Iterable[Manifest], namespace: str, now: float
) -> Capacity | None:
    """Return the capacity at a Unix time; None if there are neither nodes nor quotas. `pods`, `owners`: of our jobs.

    What our pods use is taken from `pods`, which are of the same time as their jobs' statuses.
    """
    gone = leaving_pods(pods, owners)
    total, left = quota_capacity(use.quotas, pods, gone)
    ours = {usage.uid: usage for usage in map(pod_usage, pods)}
    uses = [*(usage for usage in use.pods if usage.uid not in ours), *ours.values()]
    by_node = None if use.nodes is None else node_capacities(use.nodes, uses, gone, closed_nodes(use.nodes, pods, now))
    return combine(by_node, total, left, namespace)


def leaving_pods(pods: Iterable[Manifest], owners: Iterable[Manifest]) -> set[str]:
    """Return the uids of the pods that are or will be deleted.

    Those are pods beyond the requested size of their job, one of the `owners`, and all of a job that is being deleted.
    """
    by_job: dict[str, list[Manifest]] = {}
    gone = set()
    for pod in pods:
        if is_leaving(pod):
            gone.add(pod["metadata"]["uid"])
        elif job := (pod["metadata"].get("labels") or {}).get(names.JOB):
            by_job.setdefault(job, []).append(pod)
    for owner in owners:
        of_job = by_job.get(owner["metadata"]["name"], [])
        gone |= {pod["metadata"]["uid"] for pod in _surplus(owner, of_job)}
    return gone


def _surplus(owner: Manifest, pods: Sequence[Manifest]) -> Iterable[Manifest]:
    if is_leaving(owner):
        return pods
    if owner["kind"] == "Deployment":
        return pool_pods(pods)[owner["spec"].get("replicas") or 0 :]
    if owner["spec"].get("suspend"):
        return pods
    return [pod for pod in pods if index_of(pod) >= owner["spec"]["completions"]]


def pod_usage(pod: Manifest) -> PodUsage:
    """Return what a pod reserves. Large clusters have many pods, so nothing else of them is kept."""
    uid, where = pod["metadata"]["uid"], pod["spec"].get("nodeName")
    if not where or pod_has_ended(pod) or is_leaving(pod):
        return PodUsage(uid)
    return PodUsage(uid, sys.intern(where), {sys.intern(name): much for name, much in reserved_resources(pod).items()})


def read_usage(content: bytes) -> dict[str, Any]:
    """Return a pod in JSON as its metadata without labels and the like, and its PodUsage as "usage"."""
    pod = read_pod(content)
    return {"metadata": _identity(pod), "usage": pod_usage(pod)}


def read_known_node(content: bytes) -> dict[str, Any]:
    """Return a node in JSON as its metadata without labels and the like, and its KnownNode as "node"."""
    node = read_node(content)
    return {"metadata": _identity(node), "node": known_node(node)}


def _identity(thing: Manifest) -> Manifest:
    return {part: thing["metadata"].get(part, "") for part in _IDENTITY}


def known_node(node: Manifest) -> KnownNode:
    """Return what is kept of a node."""
    spec, status = (node.get(part) or {} for part in ("spec", "status"))
    conditions = status.get("conditions") or []
    unready = next((one for one in conditions if one["type"] == "Ready" and one["status"] != "True"), None)
    taints = [*(spec.get("taints") or ()), *([_UNREADY_TAINT] if unready else [])]
    return KnownNode(
        name=node["metadata"]["name"],
        allocatable={
            sys.intern(resource_name(name)): amount(much) for name, much in (status.get("allocatable") or {}).items()
        },
        cordoned=bool(spec.get("unschedulable")),
        unready_since=unix_time(unready.get("lastTransitionTime")) if unready else None,
        labels=node["metadata"].get("labels") or {},
        taints=_taints(taints),
        leaving=leaving_reason(node),
    )


def _taints(taints: Iterable[Manifest]) -> tuple[dict[str, str], ...]:
    """Return the taints that keep pods away, without PreferNoSchedule."""
    kept_away = [taint for taint in taints if taint.get("effect") in ("NoSchedule", "NoExecute")]
    return tuple({part: taint.get(part) or "" for part in ("key", "value", "effect")} for taint in kept_away)


def closed_nodes(nodes: Iterable[KnownNode], pods: Iterable[Manifest], now: float) -> set[str]:
    """Return the names of the nodes whose free room is lost: cordoned ones, and those that have failed.

    A node that is not ready has failed when Kubernetes would evict the last of our `pods` there. Until then it may be
    back at any moment, as when its kubelet is restarted, and only its taint keeps other pods away.
    """
    waits: dict[str, list[float]] = {}
    for pod in pods:
        waits.setdefault(mapping_at(pod, "spec").get("nodeName") or "", []).append(_eviction_delay(pod))
    return {
        node.name
        for node in nodes
        if node.cordoned
        or (
            node.unready_since is not None
            and now >= node.unready_since + max(waits.get(node.name, ()), default=EVICTED_AFTER_S)
        )
    }


def _eviction_delay(pod: Manifest) -> float:
    """Return after how many seconds Kubernetes evicts a pod from a node that is not ready."""
    own = [one for one in mappings_at(mapping_at(pod, "spec"), "tolerations") if one.get("key") in _UNREADY_KEYS]
    return min((one["tolerationSeconds"] for one in own if "tolerationSeconds" in one), default=EVICTED_AFTER_S)


def node_capacities(
    nodes: Iterable[KnownNode], pods: Iterable[PodUsage], gone: set[str], closed: Collection[str] = ()
) -> tuple[NodeCapacity, ...]:
    """Return the nodes' allocatable resources, and what of them the pods of all namespaces do not request.

    A node that is `closed`, by name, has only what its pods request. `gone`: uids of pods that do not count.
    """
    there = {node.name: node for node in nodes}
    used = {name: Counter[str]() for name in there}
    for pod in pods:
        if pod.node in used and pod.uid not in gone:
            used[pod.node].update(pod.resources)
    return tuple(_node(there[name], used[name], closed=name in closed) for name in sorted(there))


def _node(node: KnownNode, used: Mapping[str, float], *, closed: bool) -> NodeCapacity:
    total = {name: used.get(name, 0.0) for name in node.allocatable} if closed else node.allocatable
    return NodeCapacity(
        name=node.name,
        total=total,
        free=_without(total, used),
        labels=node.labels,
        taints=node.taints,
        closed_total=node.allocatable if closed else None,
    )


def _without(there: Mapping[str, float], used: Mapping[str, float]) -> dict[str, float]:
    return {name: max(0.0, much - used.get(name, 0.0)) for name, much in there.items()}


def quota_capacity(
    quotas: Iterable[Manifest], pods: Iterable[Manifest], gone: set[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a namespace's quotas allow, and what the tightest of them leave; empty if there are none.

    `pods`: the instances in the namespace. Those without a node, and the `gone` ones, do not count: a planner places or
    removes them. Quotas for some pods only, as of a priority class, are ignored.
    """
    total: dict[str, float] = {}
    left: dict[str, float] = {}
    back = Counter[str]()
    for pod in pods:
        if not pod_has_ended(pod) and (pod["metadata"]["uid"] in gone or not pod["spec"].get("nodeName")):
            back.update(reserved_resources(pod))
    for quota in filter(_is_for_instances, quotas):
        status = quota.get("status") or {}
        used = status.get("used") or {}
        for name, hard in (status.get("hard") or {}).items():
            if resource := _limited(name):
                most = amount(hard)
                free = min(most, max(0.0, most - amount(used.get(name, 0)) + back[resource]))
                total[resource] = min(total.get(resource, math.inf), most)
                left[resource] = min(left.get(resource, math.inf), free)
    return total, left


def _limited(name: str) -> str | None:
    """Return the resource that a quota limits under that name, None if instances do not request it."""
    extended = name.removeprefix("requests.")
    if extended != name and "/" in extended:
        return resource_name(extended)
    return _LIMITED.get(name)


def _is_for_instances(quota: Manifest) -> bool:
    spec = quota.get("spec") or {}
    return not spec.get("scopeSelector") and {"NotTerminating", "NotBestEffort"}.issuperset(spec.get("scopes") or ())


def combine(
    nodes: tuple[NodeCapacity, ...] | None, total: Mapping[str, float], left: Mapping[str, float], namespace: str
) -> Capacity | None:
    """Return the capacity by nodes, None if we may not list them, and quotas; None if there are neither."""
    if nodes is not None:
        return Capacity(nodes=nodes, quota_total=dict(total), quota_left=dict(left))
    if not total:
        return None
    name = f"quota of {namespace}"
    whole = NodeCapacity(name=name, total=dict(total), free=dict(left))
    return Capacity(nodes=(whole,), quota_total=dict(total), quota_left=dict(left), only_node=name)
