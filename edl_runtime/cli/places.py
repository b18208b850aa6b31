"""Where the commands find jobs."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from edl_runtime.backends.base import Backend
    from edl_runtime.backends.kubernetes import KubernetesBackend


def backend(settings: RuntimeSettings) -> Backend:
    """Return the backend that EDL_BACKEND names. Raises SpecError for a kubeconfig or context that can't be used.

    What it logs goes to stderr from now on: stdout is for what a command shows.
    """
    _log_to_stderr()
    if settings.backend == "local":
        from edl_runtime.backends.local import LocalBackend

        return LocalBackend(settings.work_dir)
    return _cluster(settings)


@asynccontextmanager
async def following(settings: RuntimeSettings) -> AsyncIterator[Backend]:
    """Give the same backend to who looks again and again: of a cluster it is told how jobs change.

    What there is for them, `Backend.capacity`, it asks for each time.
    """
    if settings.backend == "local":
        yield backend(settings)
        return
    _log_to_stderr()
    async with _cluster(settings).following() as followed:
        yield followed


def _cluster(settings: RuntimeSettings) -> KubernetesBackend:
    from edl_runtime.backends.kubernetes import KubernetesBackend
    from edl_runtime.backends.kubernetes.connect import by_kubeconfig, namespace_of

    context = settings.kube_context or None
    namespace = namespace_of(context=context)
    return KubernetesBackend(by_kubeconfig(context=context), namespace=settings.kube_namespace or namespace)


def _log_to_stderr() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def where(settings: RuntimeSettings) -> str:
    """Say where jobs are looked for, and how to look elsewhere."""
    if settings.backend == "local":
        folder = Path(settings.work_dir).expanduser()
        return f"{folder}; EDL_WORK_DIR names another folder, and EDL_BACKEND=kubernetes looks in a cluster"
    namespace = f"namespace {settings.kube_namespace!r}" if settings.kube_namespace else "the kubeconfig's namespace"
    return f"{namespace} of the cluster; EDL_KUBE_NAMESPACE and EDL_KUBE_CONTEXT name others"
