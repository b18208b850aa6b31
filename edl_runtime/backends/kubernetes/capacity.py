"""What a namespace still may have, by its quota, and where somebody lets us look, what the nodes have left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from edl_runtime.backends.base import Capacity
from edl_runtime.pods import GPU

Manifest = Mapping[str, Any]

UNLIMITED = Capacity(cpus=float(1 << 62), free_memory=1 << 62, gpus=1 << 62)
"""Where nothing says how much there is."""

_UNITS = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0,
    "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip


_LIMITED = {
    "cpu": "cpu", "requests.cpu": "cpu",
    "memory": "memory", "requests.memory": "memory", "limits.memory": "memory",
    f"requests.{GPU}": GPU,
}  # fmt: skip
"""What a quota may limit that instances ask for; of memory, what they ask for is also their limit."""


def amount(quantity: str | float) -> float:
    """Return a quantity in units: cores, bytes or pieces. Raises ValueError."""
    text = str(quantity)
    digits = text.rstrip("numkKMGTPEi")
    return float(digits) * _UNITS[text[len(digits) :]]


def of_quotas(quotas: Iterable[Manifest]) -> Capacity | None:
    """Return what the tightest of a namespace's quotas leave; None if none limits anything of it.

    Quotas for some pods only, as for those of a priority class, say nothing of all others.
    """
    left: dict[str, float] = {}
    for quota in filter(_is_for_instances, quotas):
        status = quota.get("status") or {}
        used = status.get("used") or {}
        for name, hard in (status.get("hard") or {}).items():
            if resource := _LIMITED.get(name):
                free = max(0.0, amount(hard) - amount(used.get(name, 0)))
                left[resource] = min(left.get(resource, math.inf), free)
    return _capacity(left) if left else None


def _is_for_instances(quota: Manifest) -> bool:
    spec = quota.get("spec") or {}
    return not spec.get("scopeSelector") and {"NotTerminating", "NotBestEffort"}.issuperset(spec.get("scopes") or ())


def of_nodes(nodes: Iterable[Manifest], pods: Iterable[Manifest]) -> Capacity:
    """Return what nodes that take pods have allocatable beyond what the pods on them have asked for."""
    open_nodes = {node["metadata"]["name"]: node for node in nodes if _takes_pods(node)}
    left = dict.fromkeys(("cpu", "memory", GPU), 0.0)
    for node in open_nodes.values():
        for name in left:
            left[name] += amount((node["status"].get("allocatable") or {}).get(name, 0))
    for pod in pods:
        if pod["spec"].get("nodeName") in open_nodes and pod["status"].get("phase") not in ("Succeeded", "Failed"):
            for name in left:
                left[name] -= requested(pod, name)
    return _capacity({name: max(0.0, free) for name, free in left.items()})


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
    return amount(((container.get("resources") or {}).get("requests") or {}).get(name, 0))


def _takes_pods(node: Manifest) -> bool:
    conditions = node["status"].get("conditions") or []
    is_ready = all(one["status"] == "True" for one in conditions if one["type"] == "Ready")
    return is_ready and not (node.get("spec") or {}).get("unschedulable")


def tightest(first: Capacity | None, second: Capacity | None) -> Capacity | None:
    """Return what both leave."""
    if first is None or second is None:
        return first or second
    return Capacity(
        cpus=min(first.cpus, second.cpus),
        free_memory=min(first.free_memory, second.free_memory),
        gpus=min(first.gpus, second.gpus),
    )


def _capacity(left: Mapping[str, float]) -> Capacity:
    return Capacity(
        cpus=left.get("cpu", UNLIMITED.cpus),
        free_memory=int(left.get("memory", UNLIMITED.free_memory)),
        gpus=int(left.get(GPU, UNLIMITED.gpus)),
    )
