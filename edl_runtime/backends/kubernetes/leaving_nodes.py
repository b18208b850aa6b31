"""Nodes that are about to go, by the taints that say so. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.job_status import tolerations_of
from edl_runtime.backends.kubernetes.pod_status import is_leaving, pod_has_ended
from edl_runtime.backends.kubernetes.pod_template import mapping_at, mappings_at
from edl_runtime.backends.placement import tolerates
from edl_runtime.pods import Manifest

if TYPE_CHECKING:
    from edl_runtime.backends.kubernetes.capacity import KnownNode

LEAVING_TAINTS = {
    "ToBeDeletedByClusterAutoscaler": "the cluster autoscaler removes it",
    "aws-node-termination-handler/asg-lifecycle-termination": "AWS takes it away",
    "aws-node-termination-handler/scheduled-maintenance": "AWS maintains it",
    "aws-node-termination-handler/spot-itn": "AWS takes it away",
    "cloud.google.com/impending-node-termination": "Google Cloud takes it away",
    "karpenter.sh/disrupted": "Karpenter removes it",
    "karpenter.sh/disruption": "Karpenter removes it",
    "node.cloudprovider.kubernetes.io/shutdown": "it is shut down",
    "node.kubernetes.io/out-of-service": "it is out of service",
}
"""Keys of taints, with any value and effect, and what they mean."""


def leaving_reason(node: Manifest) -> str:
    """Return why a node is about to go, empty if it is not."""
    keys = (taint.get("key", "") for taint in mappings_at(mapping_at(node, "spec"), "taints"))
    return next((f"{LEAVING_TAINTS[key]} (taint {key})" for key in keys if key in LEAVING_TAINTS), "")


def pods_to_evict(
    pods: Iterable[Manifest], owners: Iterable[Manifest], leaving: Mapping[str, KnownNode]
) -> list[tuple[Manifest, str]]:
    """Return the pods that are to leave nodes, and why in words. `leaving`: the nodes that are about to go, by name.

    Without those whose replacement could come back to the node, since its taints keep none of their job's pods away.
    """
    there = [(pod, node) for pod in pods if (node := leaving.get(mapping_at(pod, "spec").get("nodeName", "")))]
    tolerations = {one["metadata"]["name"]: tolerations_of(one["spec"]["template"]) for one in owners if there}
    return [
        (pod, f"pod {pod['metadata']['name']} has to leave node {node.name}: {node.leaving}")
        for pod, node in there
        if not (is_leaving(pod) or pod_has_ended(pod))
        and not tolerates(tolerations.get(pod["metadata"]["labels"][names.JOB], ()), node.taints)
    ]
