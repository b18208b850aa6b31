"""What the policy is told of jobs whose pods fare otherwise than their templates say."""

from __future__ import annotations

import msgspec
import pytest
from support.backends.jobs import WAITS, job, reach
from support.cluster.cluster import Cluster, RedisService

from edl_runtime.autoscale.plan import Rules
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.backends.kubernetes import names
from edl_runtime.errors import BackendError
from edl_runtime.pods import Pod
from edl_runtime.store.client import connect

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


@pytest.mark.deep
async def test_a_job_reserves_what_a_limit_range_gives_its_pods(cluster: Cluster) -> None:
    """Once it has one, whatever its template leaves open."""
    limits = f"/api/v1/namespaces/{cluster.namespace}/limitranges"
    limit = {"type": "Container", "defaultRequest": {"cpu": "7m"}}
    made = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": {"limits": [limit]}}
    await cluster.ask("POST", limits, made)
    backend = cluster.backend(resources={})
    try:
        submitted = await backend.submit(job(WAITS, kind="trainer", elastic=True), token="mine", secrets={})
        assert submitted.scaling is not None
        there = await reach(backend, "job", lambda status: any(one.node for one in status.instances))
        assert there.scaling is not None
        assert there.scaling.resources == {"cpu": 0.007, "pods": 1.0}
    finally:
        await backend.delete("job")
        await cluster.ask("DELETE", f"{limits}/small")


@pytest.mark.deep
async def test_a_job_that_has_never_run_begins_as_soon_as_there_is_room(
    cluster: Cluster, redis_service: RedisService, namespace: str
) -> None:
    """That it was suspended while it waited for a node is no pause after which it would have to rest."""
    backend = cluster.backend()
    nodes = await cluster.ask("GET", "/api/v1/nodes")
    node = f"/api/v1/nodes/{nodes['items'][0]['metadata']['name']}"
    waiting = msgspec.structs.replace(
        job(WAITS, kind="trainer", elastic=True), pod=Pod(node_selector={"edl-test/place": cluster.namespace})
    )
    async with connect(redis_service.url) as client:
        try:
            await backend.submit(waiting, token="mine", secrets={})
            await rescale(backend, client, namespace, Rules())
            suspended = await backend.get("job")
            assert (suspended.wanted, suspended.is_suspended) == (0, True)
            label = {"metadata": {"labels": {"edl-test/place": cluster.namespace}}}
            await cluster.ask("PATCH", node, label, content="application/merge-patch+json")
            await rescale(backend, client, namespace, Rules())
            assert (await backend.get("job")).wanted > 0
        finally:
            label = {"metadata": {"labels": {"edl-test/place": None}}}
            await cluster.ask("PATCH", node, label, content="application/merge-patch+json")
            await backend.delete("job")


async def test_a_job_that_waits_in_a_queue_stays_there_whatever_its_size(cluster: Cluster) -> None:
    """On a cluster without Kueue for ever: a resize that let it begin would pass others by."""
    backend = cluster.backend()
    queued = msgspec.structs.replace(job(WAITS, kind="trainer", elastic=True), pod=Pod(labels={names.QUEUE: "gpus"}))
    submitted = await backend.submit(queued, token="mine", secrets={})
    try:
        assert (submitted.phase, submitted.wanted, submitted.is_suspended) == ("pending", 1, False)
        assert submitted.reason == "suspended: it waits in Kueue's queue 'gpus'"
        assert submitted.scaling is not None
        assert (submitted.scaling.queue, submitted.scaling.resumes) == ("gpus", False)
        with pytest.raises(BackendError, match="in Kueue's queue 'gpus', which alone says when it is suspended"):
            await backend.resize("job", 0)
        resized = await backend.resize("job", 3)
        assert (resized.phase, resized.wanted) == ("pending", 3)
        (owner,) = await cluster.found("jobs")
        assert (owner["spec"]["suspend"], owner["spec"]["completions"]) == (True, 3)
    finally:
        await backend.delete("job")
