"""Connects to a cluster by a kubeconfig."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
        from kubernetes_asyncio.config import ConfigException, load_kube_config
        from yaml import YAMLError

        configuration = Configuration()
        try:
            await load_kube_config(config_file=_file(file), context=context, client_configuration=configuration)
        except (ConfigException, OSError, YAMLError) as error:
            raise _no_kubeconfig(file, error) from error
        async with ApiClient(configuration) as client:
            yield client

    return connect


def kubeconfig_namespace(file: str | None = None, context: str | None = None) -> str:
    """Return the namespace of a kubeconfig's context, "default" if it has none. Raises SpecError."""
    from kubernetes_asyncio.config import ConfigException, list_kube_config_contexts
    from yaml import YAMLError

    try:
        contexts, current = list_kube_config_contexts(config_file=_file(file))
    except (ConfigException, OSError, YAMLError) as error:
        raise _no_kubeconfig(file, error) from error
    chosen = next((each for each in contexts if each["name"] == context), None) if context else current
    if chosen is None:
        raise SpecError("EDL_KUBE_CONTEXT", context, " or ".join(repr(each["name"]) for each in contexts))
    return chosen["context"].get("namespace") or "default"


def _file(given: str | None) -> str | None:
    """Return the file or files to read, None for the default. KUBECONFIG is read each time."""
    return given or kubeconfig_file(os.environ) or None


def _no_kubeconfig(file: str | None, error: Exception) -> SpecError:
    given = _file(file) or "~/.kube/config"
    return SpecError("KUBECONFIG", given, f"a kubeconfig as `kubectl` uses it ({error})")
