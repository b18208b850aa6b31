"""The way to a Kubernetes cluster, by the hook of Airflow's own provider."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from edl_runtime.errors import SpecError

if TYPE_CHECKING:
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
    from kubernetes_asyncio.client import ApiClient

_hooks: dict[str, AsyncKubernetesHook] = {}
"""A hook keeps what it has looked up: `on_kill`, in the middle of anything, may ask nothing of Airflow."""


def way_to(conn_id: str) -> Callable[[], AbstractAsyncContextManager[ApiClient]]:
    """Return what opens a client of the cluster that a connection of type `kubernetes` leads to.

    Empty for that of the pod that this runs in. What the connection says is looked up when the first client is opened,
    and again after `forget_way`. Opening raises SpecError for a connection that leads nowhere, and Airflow's
    AirflowNotFoundException for one that does not exist.
    """

    @asynccontextmanager
    async def connect() -> AsyncIterator[ApiClient]:
        from kubernetes_asyncio.config import ConfigException

        hook = _hooks.get(conn_id) or _hooks.setdefault(conn_id, _hook(conn_id))
        try:
            opened = hook.get_conn()
            client = await opened.__aenter__()
        except (ConfigException, OSError) as error:
            where = f"connection {conn_id!r}" if conn_id else "in-cluster credentials"
            raise SpecError(where, str(error), "what leads to a cluster, as for KubernetesPodOperator") from error
        try:
            yield client
        finally:
            await opened.__aexit__(None, None, None)

    return connect


def forget_way(conn_id: str) -> None:
    """Look the connection up anew when it is next opened."""
    _hooks.pop(conn_id, None)


def _hook(conn_id: str) -> AsyncKubernetesHook:
    try:
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
    except ImportError:
        allowed = "what the extra edl-airflow[airflow-kubernetes,kubernetes] brings along"
        raise SpecError("backend 'kubernetes'", "no provider for Kubernetes", allowed) from None
    return AsyncKubernetesHook(kubernetes_conn_id=conn_id or None, in_cluster=None if conn_id else True)
