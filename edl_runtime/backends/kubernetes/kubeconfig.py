"""Connects to a cluster by a kubeconfig."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from edl_runtime.errors import SpecError
from edl_runtime.settings import kubeconfig_file

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient


def connect_by_kubeconfig(
    file: str | None = None, context: str | None = None
) -> Callable[[], AbstractAsyncContextManager[ApiClient]]:
    """Return a function that opens a client of a kubeconfig's context; it raises SpecError for an invalid one.

    `file`: KUBECONFIG by default, else ~/.kube/config. `context`: the current one by default.
    """

    @asynccontextmanager
    async def connect() -> AsyncIterator[ApiClient]:
        from kubernetes_asyncio.client import ApiClient, Configuration
        from kubernetes_asyncio.config import load_kube_config

        configuration = Configuration()
        with _reading(file) as path:
            await load_kube_config(config_file=path, context=context, client_configuration=configuration)
        async with ApiClient(configuration) as client:
            yield client

    return connect


def kubeconfig_namespace(file: str | None = None, context: str | None = None) -> str:
    """Return the namespace of a kubeconfig's context, "default" if it has none. Raises SpecError."""
    from kubernetes_asyncio.config import list_kube_config_contexts

    with _reading(file) as path:
        contexts, current = list_kube_config_contexts(config_file=path)
    chosen = next((each for each in contexts if each["name"] == context), None) if context else current
    if chosen is None:
        raise SpecError("EDL_KUBE_CONTEXT", context, " or ".join(repr(each["name"]) for each in contexts))
    return chosen["context"].get("namespace") or "default"


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
