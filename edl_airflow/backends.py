"""The backends of `edl` connections: this machine's, and those of clusters that Airflow's connections lead to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from edl_airflow.runtime.spec import BackendRef, KubernetesBackendRef, LocalBackendRef
from edl_runtime.backends.interface import Backend
from edl_runtime.errors import SpecError

if TYPE_CHECKING:
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
    from kubernetes_asyncio.client import ApiClient

    from edl_runtime.backends.kubernetes.backend import KubernetesBackend

_hooks: dict[str, AsyncKubernetesHook] = {}
"""Hooks cache their connection, because `on_kill` must not call Airflow: it may interrupt another call."""


def cluster_client_factory(conn_id: str) -> Callable[[], AbstractAsyncContextManager[ApiClient]]:
    """Return a factory of API clients for a connection of type `kubernetes`; in-cluster credentials for an empty id.

    The connection is looked up by the first client, and again after `forget_cluster_connection`. Opening a client
    raises SpecError for unusable credentials, and AirflowNotFoundException for a connection that does not exist.
    """

    @asynccontextmanager
    async def connect() -> AsyncIterator[ApiClient]:
        from kubernetes_asyncio.config import ConfigException

        hook = _hooks.get(conn_id) or _hooks.setdefault(conn_id, _kubernetes_hook(conn_id))
        try:
            opened = hook.get_conn()
            client = await opened.__aenter__()
        except (ConfigException, OSError) as error:
            where = f"connection {conn_id!r}" if conn_id else "in-cluster credentials"
            raise SpecError(where, str(error), "credentials of a cluster, as for KubernetesPodOperator") from error
        try:
            yield client
        finally:
            await opened.__aexit__(None, None, None)

    return connect


def forget_cluster_connection(conn_id: str) -> None:
    """Look the connection up again when the next client is opened."""
    _hooks.pop(conn_id, None)


def _kubernetes_hook(conn_id: str) -> AsyncKubernetesHook:
    try:
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
    except ImportError:
        allowed = "what the extra edl-airflow[airflow-kubernetes,kubernetes] installs"
        raise SpecError("backend 'kubernetes'", "no provider for Kubernetes", allowed) from None
    return AsyncKubernetesHook(kubernetes_conn_id=conn_id or None, in_cluster=None if conn_id else True)


_kubernetes_backends: dict[bytes, KubernetesBackend] = {}


def backend_for(place: BackendRef) -> Backend:
    """Return the backend. It can stop jobs without Redis and without the `edl` connection."""
    if isinstance(place, LocalBackendRef):
        from edl_runtime.backends.local.backend import LocalBackend

        return LocalBackend(place.work_dir)
    return _kubernetes_backend(place)


def _kubernetes_backend(place: KubernetesBackendRef) -> KubernetesBackend:
    """Return one backend for each `place`, so that all tasks of a triggerer share its watches."""
    from edl_runtime.backends.kubernetes.backend import KubernetesBackend

    made = KubernetesBackend(
        cluster_client_factory(place.conn_id),
        namespace=place.namespace,
        defaults=place.pod,
        kept_logs=place.kept_logs,
    )
    return _kubernetes_backends.setdefault(msgspec.json.encode(place), made)


@asynccontextmanager
async def watching_backend(place: BackendRef) -> AsyncIterator[Backend]:
    """Open a backend that reads jobs from watches instead of asking the cluster each time."""
    if isinstance(place, LocalBackendRef):
        yield await asyncio.to_thread(backend_for, place)
        return

    forget_cluster_connection(place.conn_id)  # a user may have edited it since
    pods = await asyncio.to_thread(_kubernetes_backend, place)
    async with pods.following() as followed:
        yield followed
