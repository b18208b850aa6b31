"""Runs jobs as pods of a Kubernetes cluster, with nothing of ours installed in it.

The first process of a pod, `edl_runtime.backends.kubernetes.init`, needs none of it and doesn't wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl_runtime.backends.kubernetes.backend import KubernetesBackend

__all__ = ["KubernetesBackend"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edl_runtime.backends.kubernetes import backend

    return getattr(backend, name)
