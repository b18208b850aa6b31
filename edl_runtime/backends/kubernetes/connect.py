"""Ways to a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from edl_runtime.errors import SpecError

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient


def by_kubeconfig(
    file: str | None = None, context: str | None = None
) -> Callable[[], AbstractAsyncContextManager[ApiClient]]:
    """Return what opens a client of the cluster of a kubeconfig's context.

    By default the file that KUBECONFIG names, else ~/.kube/config, and its current context. Raises SpecError when it is
    opened and that is no kubeconfig.
    """

    @asynccontextmanager
    async def connect() -> AsyncIterator[ApiClient]:
        from kubernetes_asyncio.client import ApiClient, Configuration
        from kubernetes_asyncio.config import ConfigException, load_kube_config

        configuration = Configuration()
        try:
            await load_kube_config(config_file=file, context=context, client_configuration=configuration)
        except (ConfigException, OSError) as error:
            allowed = "a kubeconfig, as the one that `kubectl` uses"
            raise SpecError("KUBECONFIG", file or "~/.kube/config", f"{allowed} ({error})") from error
        async with ApiClient(configuration) as client:
            yield client

    return connect


def inside_the_cluster() -> Callable[[], AbstractAsyncContextManager[ApiClient]]:
    """Return what opens a client by the service account of the pod that this runs in.

    Raises SpecError when it is opened in no pod.
    """

    @asynccontextmanager
    async def connect() -> AsyncIterator[ApiClient]:
        from kubernetes_asyncio.client import ApiClient, Configuration
        from kubernetes_asyncio.config import ConfigException, load_incluster_config

        configuration = Configuration()
        try:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except ConfigException as error:
            raise SpecError("in_cluster", "outside of a pod", f"a pod with a service account ({error})") from error
        async with ApiClient(configuration) as client:
            yield client

    return connect
