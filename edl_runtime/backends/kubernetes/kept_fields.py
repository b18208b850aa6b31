"""What is kept of objects that there are thousands of: only these fields are decoded, all others are skipped."""

from __future__ import annotations

from typing import Any, TypedDict

from edl_runtime.backends.kubernetes.client import Read
from edl_runtime.parsing import JsonDecoder


class _Metadata(TypedDict, total=False):
    name: Any
    namespace: Any
    uid: Any
    resourceVersion: Any
    creationTimestamp: Any
    deletionTimestamp: Any
    finalizers: Any
    labels: Any
    annotations: Any


class _Container(TypedDict, total=False):
    name: Any
    resources: Any
    restartPolicy: Any


class _PodSpec(TypedDict, total=False):
    nodeName: Any
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
    metadata: _Metadata
    spec: _PodSpec
    status: _PodStatus


class _TemplateContainer(_Container, total=False):
    env: Any


class _TemplateSpec(TypedDict, total=False):
    nodeSelector: Any
    affinity: Any
    tolerations: Any
    overhead: Any
    schedulingGates: Any
    containers: list[_TemplateContainer] | None
    initContainers: list[_TemplateContainer] | None


class _Template(TypedDict, total=False):
    spec: _TemplateSpec


class _OwnerSpec(TypedDict, total=False):
    completions: Any
    replicas: Any
    suspend: Any
    template: _Template


class _Owner(TypedDict, total=False):
    metadata: _Metadata
    spec: _OwnerSpec
    status: Any


class _NodeSpec(TypedDict, total=False):
    unschedulable: Any
    taints: Any


class _NodeStatus(TypedDict, total=False):
    allocatable: Any
    conditions: list[_Condition] | None


class _Node(TypedDict, total=False):
    metadata: _Metadata
    spec: _NodeSpec
    status: _NodeStatus


class _OwnedMetadata(_Metadata, total=False):
    ownerReferences: Any


class _Conditions(TypedDict, total=False):
    conditions: Any


class _Workload(TypedDict, total=False):
    metadata: _OwnedMetadata
    status: _Conditions


def _reader(fields: Any) -> Read:
    return JsonDecoder(fields).decode


read_pod = _reader(_Pod)
"""Reads what statuses and capacities need of a pod, without its environment and volumes."""

read_owner = _reader(_Owner)
"""Reads what statuses and resizes need of a Job or Deployment."""

read_node = _reader(_Node)
"""Reads what capacities and evictions need of a node, without its list of images and the like."""

read_workload = _reader(_Workload)
"""Reads what statuses need of a Workload of Kueue's, without its pod templates."""
