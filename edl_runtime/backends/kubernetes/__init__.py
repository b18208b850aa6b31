"""Runs jobs as pods of a Kubernetes cluster, with nothing of ours installed in it."""

from edl_runtime.backends.kubernetes.backend import KubernetesBackend

__all__ = ["KubernetesBackend"]
