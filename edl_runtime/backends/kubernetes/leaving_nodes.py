"""Nodes that are about to go, by the taints that say so. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edl_runtime.backends.kubernetes.pod_status import is_leaving, pod_has_ended
from edl_runtime.backends.kubernetes.pod_template import mapping_at, mappings_at
from edl_runtime.pods import Manifest

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


def pods_to_evict(pods: Iterable[Manifest], leaving: Mapping[str, str]) -> list[tuple[Manifest, str]]:
    """Return the pods that are to leave nodes, and why in words. `leaving`: why nodes are about to go, by name."""
    there = [pod for pod in pods if mapping_at(pod, "spec").get("nodeName") in leaving]
    return [
        (pod, f"pod {pod['metadata']['name']} has to leave node {node}: {leaving[node]}")
        for pod in there
        if not (is_leaving(pod) or pod_has_ended(pod)) and (node := pod["spec"]["nodeName"])
    ]
