"""The backend that commands use, and what must hold before they start a job."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import structlog

from edl_runtime.backends.errors import JobRunsError, UnknownJobError
from edl_runtime.backends.interface import Backend
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import redis_client

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.backends.interface import Backend
    from edl_runtime.backends.kubernetes.backend import KubernetesBackend


def open_backend(settings: RuntimeSettings) -> Backend:
    """Return the backend that EDL_BACKEND names. Raises SpecError for a kubeconfig or context that can't be used.

    What it logs goes to stderr from now on: stdout is for what a command shows.
    """
    _log_to_stderr()
    if settings.backend == "local":
        from edl_runtime.backends.local.backend import LocalBackend

        return LocalBackend(settings.work_dir)
    return _kubernetes_backend(settings)


@asynccontextmanager
async def watch_backend(settings: RuntimeSettings) -> AsyncIterator[Backend]:
    """Give the same backend to who looks again and again: of a cluster it is told how jobs change.

    What there is for them, `Backend.capacity`, it asks for each time.
    """
    if settings.backend == "local":
        yield open_backend(settings)
        return
    _log_to_stderr()
    async with _kubernetes_backend(settings).following() as followed:
        yield followed


def _kubernetes_backend(settings: RuntimeSettings) -> KubernetesBackend:
    from edl_runtime.backends.kubernetes.backend import KubernetesBackend
    from edl_runtime.backends.kubernetes.kubeconfig import connect_by_kubeconfig, kubeconfig_namespace

    context = settings.kube_context or None
    namespace = kubeconfig_namespace(context=context)
    return KubernetesBackend(connect_by_kubeconfig(context=context), namespace=settings.kube_namespace or namespace)


def _log_to_stderr() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def describe_location(settings: RuntimeSettings) -> str:
    """Say where jobs are looked for, and how to look elsewhere."""
    if settings.backend == "local":
        folder = Path(settings.work_dir).expanduser()
        return f"{folder}; EDL_WORK_DIR names another folder, and EDL_BACKEND=kubernetes looks in a cluster"
    namespace = f"namespace {settings.kube_namespace!r}" if settings.kube_namespace else "the kubeconfig's namespace"
    return f"{namespace} of the cluster; EDL_KUBE_NAMESPACE and EDL_KUBE_CONTEXT name others"


# What the commands that start a job share.


async def warn_of_eviction(client: Redis) -> None:
    """Say what is to be set in a Redis that may delete what a job needs. Raises RegistryUnavailableError."""
    if warning := await redis_client.eviction_warning(client):
        click.echo(f"edl: warning: {warning}", err=True)


async def remove_ended_job(backend: Backend, name: str) -> None:
    """Forget an ended job of that name: who starts one again means it, also when it has succeeded before.

    Raises JobRunsError for one that has not ended.
    """
    try:
        status = await backend.get(name)
    except UnknownJobError:
        return
    if not status.has_ended:
        raise JobRunsError(name, datetime.fromtimestamp(status.created_at).astimezone(), status.cwd)
    await backend.delete(name, token=status.token)
