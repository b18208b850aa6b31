"""A cache of nodes, of what the pods on them reserve, and of a namespace's quotas, kept up to date by watches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from edl_runtime.backends.kubernetes import capacity, names
from edl_runtime.backends.kubernetes.capacity import SCHEDULED_PODS, ClusterUse
from edl_runtime.backends.kubernetes.client import Manifest, Outage
from edl_runtime.backends.kubernetes.informer import Indexer, Watches
from edl_runtime.backends.kubernetes.kept_fields import read_node

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient


class NodeInformer(Watches):
    """The nodes of a cluster with the pods on them, as far as we may watch them, and the quotas of a namespace.

    Without the pods of that namespace's jobs, which `Informer` knows: there are thousands of them.
    """

    def __init__(
        self, connect: Callable[[], AbstractAsyncContextManager[ApiClient]], namespace: str, outage: Outage
    ) -> None:
        self._quotas = Indexer("ResourceQuota", _any)
        self._nodes = Indexer("Node", _any, read=read_node, everywhere=True, is_optional=True)
        elsewhere = f"{SCHEDULED_PODS},metadata.namespace!={namespace}"
        self._pods = [
            Indexer(
                "Pod", _any, labels=labels, fields=fields, read=capacity.read_usage, everywhere=True, is_optional=True
            )
            for labels, fields in ((f"!{names.JOB}", SCHEDULED_PODS), (names.JOB, elsewhere))
        ]
        super().__init__(connect, namespace, outage, (self._quotas, self._nodes, *self._pods))

    async def read(self) -> ClusterUse:
        """Return what there is, without a request once all is known.

        Raises ClusterError; ClusterUnavailableError while the API server is away for long.
        """
        async with self.using():
            refused = next(filter(None, (indexer.refused for indexer in (self._nodes, *self._pods))), None)
            return ClusterUse(
                quotas=[*self._quotas.all],
                nodes=None if refused else [*self._nodes.all],
                pods=[] if refused else [pod["usage"] for indexer in self._pods for pod in indexer.all],
                why=str(refused or ""),
            )


def _any(_: Manifest) -> str:
    return ""
