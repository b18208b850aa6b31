"""A cache of nodes, of what the pods on them reserve, and of a namespace's quotas, kept up to date by watches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from edl_runtime.backends.kubernetes import capacity
from edl_runtime.backends.kubernetes.capacity import SCHEDULED_PODS, ClusterUse
from edl_runtime.backends.kubernetes.client import Manifest, Outage
from edl_runtime.backends.kubernetes.informer import Indexer, Watches
from edl_runtime.backends.kubernetes.leaving_nodes import leaving_reason, trim_to_taints

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient


class NodeInformer(Watches):
    """The nodes of a cluster with all its pods, as far as we may watch them, and the quotas of a namespace."""

    def __init__(
        self, connect: Callable[[], AbstractAsyncContextManager[ApiClient]], namespace: str, outage: Outage
    ) -> None:
        self._quotas = Indexer("ResourceQuota", _any)
        self._nodes = Indexer("Node", _any, trim=capacity.trim_node, everywhere=True, is_optional=True)
        self._pods = Indexer(
            "Pod", _any, fields=SCHEDULED_PODS, trim=capacity.trim_pod_usage, everywhere=True, is_optional=True
        )
        super().__init__(connect, namespace, outage, (self._quotas, self._nodes, self._pods))

    async def read(self) -> ClusterUse:
        """Return what there is, without a request once all is known.

        Raises ClusterError; ClusterUnavailableError while the API server is away for long.
        """
        async with self.using():
            refused = self._nodes.refused or self._pods.refused
            return ClusterUse(
                quotas=[*self._quotas.all],
                nodes=None if refused else [*self._nodes.all],
                pods=[] if refused else [pod["usage"] for pod in self._pods.all],
                why=str(refused or ""),
            )


class LeavingNodes(Watches):
    """The nodes of a cluster that are about to go, as far as we may watch nodes."""

    def __init__(
        self, connect: Callable[[], AbstractAsyncContextManager[ApiClient]], namespace: str, outage: Outage
    ) -> None:
        self._nodes = Indexer("Node", leaving_reason, trim=trim_to_taints, everywhere=True, is_optional=True)
        super().__init__(connect, namespace, outage, (self._nodes,))

    async def read(self) -> dict[str, str]:
        """Return why nodes are about to go, by name. Raises as `NodeInformer.read`."""
        async with self.using():
            return {
                node["metadata"]["name"]: why for why in self._nodes.subjects if why for node in self._nodes.of(why)
            }


def _any(_: Manifest) -> str:
    return ""
