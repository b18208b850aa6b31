"""Connects to a cluster by a kubeconfig, or by the service account of this pod."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edl_runtime.errors import SpecError
from edl_runtime.settings import kubeconfig_file

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

DEFAULT_FILE = "~/.kube/config"

NAMESPACE_OF_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod with a service account finds its own namespace."""


def connect_by_kubeconfig(
    file: str | None = None, context: str | None = None
) -> Callable[[], AbstractAsyncContextManager[ApiClient]]:
    """Return a function that opens a client of a kubeconfig's context; it raises SpecError for an invalid one.

    `file`: KUBECONFIG by default, else ~/.kube/config, else a pod's service account, as kubectl does. `context`: the
    current one by default.
    """

    @asynccontextmanager
    async def connect() -> AsyncIterator[ApiClient]:
        from kubernetes_asyncio.client import ApiClient, Configuration
        from kubernetes_asyncio.config import load_incluster_config, load_kube_config

        configuration = Configuration()
        with _reading(file) as path:
            if _is_in_pod(path, context):
                load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            else:
                await load_kube_config(config_file=path, context=context, client_configuration=configuration)
        async with ApiClient(configuration) as client:
            yield client

    return connect


def kubeconfig_namespace(file: str | None = None, context: str | None = None) -> str:
    """Return the namespace of a kubeconfig's context, "default" if it has none, or this pod's. Raises SpecError."""
    from kubernetes_asyncio.config import list_kube_config_contexts

    with _reading(file) as path:
        if _is_in_pod(path, context):
            return NAMESPACE_OF_POD.read_text().strip()
        contexts, current = list_kube_config_contexts(config_file=path)
    chosen = next((each for each in contexts if each["name"] == context), None) if context else current
    if chosen is None:
        raise SpecError("EDL_KUBE_CONTEXT", context, " or ".join(repr(each["name"]) for each in contexts))
    return chosen["context"].get("namespace") or "default"


def _is_in_pod(file: str | None, context: str | None) -> bool:
    """Whether there is no kubeconfig, but a pod's service account."""
    has_file = Path(os.path.expanduser(DEFAULT_FILE)).exists()  # noqa: PTH111 - a pod's user may have no home
    return not (file or context or has_file) and NAMESPACE_OF_POD.exists()


@contextmanager
def _reading(file: str | None) -> Iterator[str | None]:
    """Yield the file or files to read, None for the default; raise SpecError if they are no kubeconfig."""
    from kubernetes_asyncio.config import ConfigException
    from yaml import YAMLError

    path = file or kubeconfig_file(os.environ) or None  # KUBECONFIG may change while this process runs
    try:
        yield path
    except (ConfigException, OSError, YAMLError) as error:
        allowed = f"a kubeconfig as `kubectl` uses it ({error})"
        raise SpecError("KUBECONFIG", path or "~/.kube/config", allowed) from error
