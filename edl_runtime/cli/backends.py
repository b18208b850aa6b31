"""The backend of the commands, and checks before a job is started."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edl_runtime.backends.errors import JobRunsError, UnknownJobError
from edl_runtime.backends.interface import Backend
from edl_runtime.elastic.agent.failures import NOT_WRITTEN
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import redis_client

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient
    from redis.asyncio import Redis

    from edl_runtime.backends.kubernetes.backend import KubernetesBackend


def open_backend(settings: RuntimeSettings) -> Backend:
    """Return the backend that EDL_BACKEND names. Raises SpecError for a kubeconfig or context that can't be used."""
    if settings.backend == "local":
        from edl_runtime.backends.local.backend import LocalBackend

        return LocalBackend(settings.work_dir)
    return _kubernetes_backend(settings)


@asynccontextmanager
async def watch_backend(settings: RuntimeSettings) -> AsyncIterator[Backend]:
    """Give the same backend for repeated reads: of a cluster it watches jobs and nodes instead of listing them."""
    if settings.backend == "local":
        yield open_backend(settings)
        return
    async with _kubernetes_backend(settings).following() as followed:
        yield followed


def _kubernetes_backend(settings: RuntimeSettings) -> KubernetesBackend:
    from edl_runtime.backends.kubernetes.backend import KubernetesBackend

    connect, namespace = kubernetes_place(settings)
    return KubernetesBackend(connect, namespace=namespace, kept_logs=settings.kube_kept_logs)


def kubernetes_place(settings: RuntimeSettings) -> tuple[Callable[[], AbstractAsyncContextManager[ApiClient]], str]:
    """Return a function that opens a client of the cluster, and the namespace. Raises SpecError."""
    from edl_runtime.backends.kubernetes.kubeconfig import connect_by_kubeconfig, kubeconfig_namespace

    context = settings.kube_context or None
    namespace = kubeconfig_namespace(context=context)
    return connect_by_kubeconfig(context=context), settings.kube_namespace or namespace


def describe_location(settings: RuntimeSettings) -> str:
    """Return where jobs are searched, and how to search elsewhere."""
    if settings.backend == "local":
        folder = Path(settings.work_dir).expanduser()
        return f"{folder}; EDL_WORK_DIR names another folder, and EDL_BACKEND=kubernetes searches a cluster"
    namespace = f"namespace {settings.kube_namespace!r}" if settings.kube_namespace else "the kubeconfig's namespace"
    return f"{namespace} of the cluster; EDL_KUBE_NAMESPACE and EDL_KUBE_CONTEXT name others"


def is_unwritten(line: str) -> bool:
    """Whether it is an agent's last line, and says that a job that ends has not written its last checkpoint."""
    return line.startswith("edl: ") and NOT_WRITTEN in line


# Checks of the commands that start a job.


async def warn_of_eviction(client: Redis) -> None:
    """Warn of a Redis that may evict keys that a job needs. Raises RegistryUnavailableError."""
    if warning := await redis_client.eviction_warning(client):
        click.echo(f"edl: warning: {warning}", err=True)


async def remove_ended_job(backend: Backend, name: str) -> None:
    """Delete an ended job of that name, also one that succeeded: starting it again is deliberate.

    Raises JobRunsError for one that has not ended.
    """
    try:
        status = await backend.get(name)
    except UnknownJobError:
        return
    if not status.has_ended:
        raise JobRunsError(name, datetime.fromtimestamp(status.created_at).astimezone(), status.cwd)
    await backend.delete(name, token=status.token)
