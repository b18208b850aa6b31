"""A real cluster for tests, in a namespace of their own: the one that KUBECONFIG, or --kubeconfig, names."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edl_runtime.backends.kubernetes import KubernetesBackend
from edl_runtime.backends.kubernetes.connect import by_kubeconfig
from edl_runtime.pods import Pod, Volume

IMAGE = "EDL_TEST_IMAGE"
"""The variable that names an image of the runtime that the cluster has."""


class Cluster:
    """A namespace in a cluster whose pods can use `image`."""

    def __init__(self, kubeconfig: str, image: str) -> None:
        self.kubeconfig = kubeconfig
        self.image = image
        self.namespace = f"edl-test-{secrets.token_hex(3)}"
        self.connect = by_kubeconfig(kubeconfig)

    def backend(self, shared: Path | None = None, **more: Any) -> KubernetesBackend:
        """Return a backend whose pods see the folder `shared` under its own path."""
        volumes = []
        if shared:
            shared.chmod(0o777)
            volumes = [Volume(path=str(shared), source={"hostPath": {"path": str(shared)}})]
        defaults = Pod(image=self.image, resources={"cpu": "20m"}, volumes=volumes, **more)
        return KubernetesBackend(self.connect, namespace=self.namespace, defaults=defaults)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the API server something that the backend has no verb for."""
        import json

        async with self.connect() as client:
            response = await client.call_api(
                path,
                method,
                body=body,
                header_params={"Content-Type": "application/json", "Accept": "application/json"},
                auth_settings=["BearerToken"],
                _preload_content=False,
            )
            async with response:
                answer = json.loads(await response.read())
        if response.status >= 300 and response.status != 404:
            raise RuntimeError(answer)
        return answer


@contextmanager
def own_namespace(kubeconfig: str, image: str) -> Iterator[Cluster]:
    """Make a namespace, and remove it with all that is in it."""
    cluster = Cluster(kubeconfig, image)
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": cluster.namespace}}
    asyncio.run(cluster.ask("POST", "/api/v1/namespaces", made))
    try:
        yield cluster
    finally:
        asyncio.run(cluster.ask("DELETE", f"/api/v1/namespaces/{cluster.namespace}"))


def why_none(kubeconfig: str) -> str:
    """Return why there is no cluster to test on, empty if there is one."""
    if not kubeconfig:
        return "no Kubernetes here: KUBECONFIG names none (a kind or k3d cluster will do)"
    if not Path(kubeconfig).exists():
        return f"no Kubernetes here: KUBECONFIG names {kubeconfig}, which is not there"
    if not os.environ.get(IMAGE):
        return f"{IMAGE} names no image of the runtime that the cluster has; see deploy/Dockerfile"
    return ""
