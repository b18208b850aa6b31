"""What a pod takes of its node. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edl_runtime.pods import GPU, amount

Manifest = Mapping[str, Any]

PODS = "pods"
"""The resource of which every pod takes one, as nodes and quotas limit them."""


def reserved(pod: Manifest) -> dict[str, float]:
    """Return what a pod, or one of such a template, takes of its node, by the names of `Scaling.resources`."""
    spec = pod.get("spec") or {}
    containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    asked = {name for container in containers for name in _amounts(container)} | (spec.get("overhead") or {}).keys()
    found = {resource_of(name): requested(pod, name) for name in sorted(asked)}
    return {**{name: much for name, much in found.items() if much}, PODS: 1.0}


def resource_of(name: str) -> str:
    """Return what a resource of Kubernetes is called in a `Pod`."""
    return "gpu" if name == GPU else name


def kubernetes_name(resource: str) -> str:
    """Return what Kubernetes calls a resource of a `Pod`."""
    return GPU if resource == "gpu" else resource


def requested(pod: Manifest, name: str) -> float:
    """Return what a pod reserves: what its containers ask for together, or what it takes to get there if that is more.

    Init containers that go on running count beside all that start after them, the others for themselves.
    """
    spec = pod["spec"]
    sidecars = most = 0.0
    for container in spec.get("initContainers") or []:
        asked = _asked(container, name)
        most = max(most, sidecars + asked)
        sidecars += asked if container.get("restartPolicy") == "Always" else 0.0
    together = sidecars + sum(_asked(container, name) for container in spec.get("containers") or [])
    return max(most, together) + amount((spec.get("overhead") or {}).get(name, 0))


def _asked(container: Manifest, name: str) -> float:
    return amount(_amounts(container).get(name, 0))


def _amounts(container: Manifest) -> dict[str, Any]:
    """Return what a container asks for. Where it says only a limit, pods ask for that."""
    resources = container.get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
