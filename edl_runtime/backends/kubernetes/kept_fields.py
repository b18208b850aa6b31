"""What is kept of objects that there are thousands of: only these fields are decoded, all others are skipped."""

from __future__ import annotations

from typing import Any, TypedDict

from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.client import Manifest, Read
from edl_runtime.backends.kubernetes.pod_template import mapping_at
from edl_runtime.parsing import JsonDecoder


class _BareMetadata(TypedDict, total=False):
    name: Any
    namespace: Any
    uid: Any
    resourceVersion: Any
    creationTimestamp: Any
    deletionTimestamp: Any
    finalizers: Any


class _Metadata(_BareMetadata, total=False):
    labels: Any
    annotations: Any


_PodLabels = TypedDict("_PodLabels", {names.JOB: Any, names.RUN: Any}, total=False)  # type: ignore[misc]
_PodAnnotations = TypedDict(
    "_PodAnnotations",
    {names.INDEX: Any, names.FAILURES: Any, names.DISRUPTIONS: Any},  # type: ignore[misc]
    total=False,
)


class _PodMetadata(_BareMetadata, total=False):
    labels: _PodLabels | None
    annotations: _PodAnnotations | None


class _Container(TypedDict, total=False):
    name: Any
    resources: Any
    restartPolicy: Any


class _Toleration(TypedDict, total=False):
    key: Any
    tolerationSeconds: Any


class _PodSpec(TypedDict, total=False):
    nodeName: Any
    tolerations: list[_Toleration] | None
    overhead: Any
    schedulingGates: Any
    containers: list[_Container] | None
    initContainers: list[_Container] | None


class _Condition(TypedDict, total=False):
    type: Any
    status: Any
    reason: Any
    message: Any


class _ContainerStatus(TypedDict, total=False):
    name: Any
    image: Any
    restartCount: Any
    state: Any
    lastState: Any


class _PodStatus(TypedDict, total=False):
    phase: Any
    reason: Any
    message: Any
    conditions: list[_Condition] | None
    containerStatuses: list[_ContainerStatus] | None
    initContainerStatuses: list[_ContainerStatus] | None


class _Pod(TypedDict, total=False):
    metadata: _PodMetadata
    spec: _PodSpec | None
    status: _PodStatus | None


class _Variable(TypedDict, total=False):
    name: Any
    value: Any
    valueFrom: Any


class _TemplateContainer(_Container, total=False):
    env: list[_Variable] | None


class _TemplateSpec(TypedDict, total=False):
    nodeSelector: Any
    affinity: Any
    tolerations: Any
    overhead: Any
    schedulingGates: Any
    containers: list[_TemplateContainer] | None
    initContainers: list[_TemplateContainer] | None


class _Template(TypedDict, total=False):
    spec: _TemplateSpec | None


class _OwnerSpec(TypedDict, total=False):
    completions: Any
    replicas: Any
    suspend: Any
    template: _Template | None


class _Owner(TypedDict, total=False):
    metadata: _Metadata
    spec: _OwnerSpec | None
    status: Any


class _NodeSpec(TypedDict, total=False):
    unschedulable: Any
    taints: Any


class _NodeCondition(TypedDict, total=False):
    type: Any
    status: Any
    lastTransitionTime: Any


class _NodeStatus(TypedDict, total=False):
    allocatable: Any
    conditions: list[_NodeCondition] | None


class _Node(TypedDict, total=False):
    metadata: _Metadata
    spec: _NodeSpec | None
    status: _NodeStatus | None


class _OwnedMetadata(_Metadata, total=False):
    ownerReferences: Any


class _Conditions(TypedDict, total=False):
    conditions: Any


class _Workload(TypedDict, total=False):
    metadata: _OwnedMetadata
    status: _Conditions | None


def _reader(fields: Any) -> Read:
    return JsonDecoder(fields).decode


_read_pod = _reader(_Pod)
_read_owner = _reader(_Owner)

EVICTED_AFTER_S = 300
"""How long by default Kubernetes leaves pods on a node that is not ready."""

_POD_CONDITIONS = {("DisruptionTarget", "True"), ("PodReadyToStartContainers", "True"), ("PodScheduled", "False")}


def read_pod(content: bytes) -> Manifest:
    """Return what statuses and capacities need of a pod, without its environment and volumes."""
    pod = _read_pod(content)
    status = pod.get("status") or {}
    if conditions := status.get("conditions"):
        status["conditions"] = [one for one in conditions if (one.get("type"), one.get("status")) in _POD_CONDITIONS]
    spec = pod.get("spec") or {}
    if tolerations := spec.pop("tolerations", None):  # of nearly all pods they are the default ones
        own = [one for one in tolerations if one.get("tolerationSeconds") not in (None, EVICTED_AFTER_S)]
        spec.update({"tolerations": own} if own else {})
    return pod


def read_pod_of_job(content: bytes) -> Manifest:
    """As `read_pod`. Raises ValueError for a pod whose counts are no numbers: no Job's controller has made it."""
    pod = read_pod(content)
    annotations = mapping_at(pod, "metadata", "annotations")
    for count in (names.INDEX, names.FAILURES, names.DISRUPTIONS):
        int(annotations.get(count) or 0)
    return pod


def read_owner(content: bytes) -> Manifest:
    """Return what statuses and resizes need of a Job or Deployment. Raises ValueError for one without a size."""
    owner = _read_owner(content)
    if not mapping_at(owner, "spec").keys() & {"completions", "replicas"}:
        raise ValueError("a Job without completions is no job of ours")
    for container in mapping_at(owner, "spec", "template", "spec").get("containers") or ():
        if env := container.get("env"):
            container["env"] = [one for one in env if one["name"] in ("EDL_CHECKPOINT", "EDL_POOL")]
    return owner


read_node = _reader(_Node)
"""Reads what capacities and evictions need of a node, without its list of images and the like."""

read_workload = _reader(_Workload)
"""Reads what statuses need of a Workload of Kueue's, without its pod templates."""
