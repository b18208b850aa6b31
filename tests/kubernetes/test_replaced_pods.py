"""Pods of a pool that are there still, though others have taken their place."""

from __future__ import annotations

import pytest
from support.backends.jobs import WAITS, eventually, followed, job, lines, reach, says
from support.cluster.cluster import Cluster

from edl_runtime.backends.base import JobStatus
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.api import Api

pytestmark = [pytest.mark.kubernetes, pytest.mark.deep, pytest.mark.timeout(600)]

HELD = {"metadata": {"finalizers": ["example.com/held"]}}
FREE = {"metadata": {"finalizers": None}}


async def test_a_pool_is_resized_beside_a_pod_that_was_replaced(cluster: Cluster) -> None:
    """The pod is no instance any more, so it is neither counted nor chosen to leave."""
    backend = cluster.backend()
    await backend.submit(job(WAITS, name="replaced", instances=2), token="mine", secrets={})
    await says(backend, "up", name="replaced", instances=2)
    async with cluster.connect() as client:
        api = Api(client, cluster.namespace)
        (lost, *_), _ = await api.list("Pod", labels=names.selector("replaced"))
        await api.patch(lost, HELD)
        try:
            await api.delete(lost)

            async def has_failed() -> bool:
                now = await api.get("Pod", lost["metadata"]["name"])
                return bool(now and now["status"]["phase"] == "Failed")

            await eventually(has_failed, "the end of the pod that is kept")
            await reach(backend, "replaced", lambda status: running(status) == [0, 1])
            await says(backend, "up", name="replaced", instances=2)
            assert await lines(backend, "replaced") == [(0, "up"), (1, "up")]
            async with followed(backend, "replaced") as seen:

                async def both_are_seen() -> bool:
                    return sorted(seen) == [(0, "up"), (1, "up")]

                await eventually(both_are_seen, "lines of both instances")
            await backend.resize("replaced", 1)
            await reach(backend, "replaced", lambda status: running(status) == [0])
        finally:
            await api.patch(lost, FREE)
            await backend.delete("replaced")


def running(status: JobStatus) -> list[int]:
    assert all(instance.phase in ("pending", "running") for instance in status.instances)
    return [instance.index for instance in status.instances if instance.phase == "running"]
