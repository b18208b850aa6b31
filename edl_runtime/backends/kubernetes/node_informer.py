"""A cache of nodes, of what the pods on them reserve, and of a namespace's quotas, kept up to date by watches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from edl_runtime.backends.kubernetes import capacity, names
from edl_runtime.backends.kubernetes.capacity import SCHEDULED_PODS, ClusterUse, KnownNode
from edl_runtime.backends.kubernetes.client import Manifest, Outage
from edl_runtime.backends.kubernetes.informer import Indexer, Watches

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient


class NodeInformer(Watches):
    """The nodes of a cluster, as far as we may watch them; for `read`, also the pods on them and a namespace's quotas.

    Without the pods of that namespace's jobs, which `Informer` knows: there are thousands of them.
    """

    def __init__(
        self, connect: Callable[[], AbstractAsyncContextManager[ApiClient]], namespace: str, outage: Outage
    ) -> None:
        self._nodes = Indexer("Node", _leaving, read=capacity.read_known_node, everywhere=True, is_optional=True)
        self._quotas = Indexer("ResourceQuota", _any)
        elsewhere = f"{SCHEDULED_PODS},metadata.namespace!={namespace}"
        self._pods = [
            Indexer(
                "Pod", _any, labels=labels, fields=fields, read=capacity.read_usage, everywhere=True, is_optional=True
            )
            for labels, fields in ((f"!{names.JOB}", SCHEDULED_PODS), (names.JOB, elsewhere))
        ]
        self._counts_use = False
        super().__init__(connect, namespace, outage, (self._nodes, self._quotas, *self._pods))

    async def leaving(self) -> dict[str, KnownNode]:
        """Return the nodes that are about to go, by name; none where we may not watch nodes. Raises as `read`."""
        async with self.using():
            going = [node["node"] for why in self._nodes.subjects if why for node in self._nodes.of(why)]
            return {node.name: node for node in going}

    async def read(self) -> ClusterUse:
        """Return what there is, without a request once all is known.

        Raises ClusterError; ClusterUnavailableError while the API server is away for long.
        """
        if not self._counts_use:
            for indexer in (self._quotas, *self._pods):
                indexer.clear()  # its silence begins now
            self._counts_use = True
            await self._notify()
        async with self.using():
            refused = next(filter(None, (indexer.refused for indexer in (self._nodes, *self._pods))), None)
            return ClusterUse(
                quotas=[*self._quotas.all],
                nodes=None if refused else [node["node"] for node in self._nodes.all],
                pods=[] if refused else [pod["usage"] for indexer in self._pods for pod in indexer.all],
                why=str(refused or ""),
            )

    def _is_needed(self, indexer: Indexer) -> bool:
        """Quotas and pods are watched from the first `read` on."""
        return indexer is self._nodes or self._counts_use


def _leaving(node: Manifest) -> str:
    known: KnownNode = node["node"]
    return known.leaving


def _any(_: Manifest) -> str:
    return ""
