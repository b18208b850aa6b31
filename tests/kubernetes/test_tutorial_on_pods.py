"""The log of the original's tutorial, with pods on a real cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.autoscale.tutorial import MAX_LOAD, OTHER_LOAD, SIZES, Tutorial
from support.cluster.cluster import Cluster, RedisService
from support.cluster.trainingjobs import controller, events, kubectl, manifest, trainingjobs_served

from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.backends.interface import Backend
from edl_runtime.store.redis_client import connect

pytestmark = [pytest.mark.kubernetes, pytest.mark.deep, pytest.mark.system, pytest.mark.timeout(900)]
"""It needs a cluster without other load, so it runs after the tests that share one."""


async def _cpus(backend: Backend) -> tuple[float, float]:
    """Return how many CPUs the nodes have, and how many are reserved."""
    nodes = (await backend.capacity()).nodes
    total = sum(node.total["cpu"] for node in nodes)
    return total, total - sum(node.free["cpu"] for node in nodes)


@asynccontextmanager
async def _other_load(cluster: Cluster, cpus: float) -> AsyncIterator[None]:
    """Reserve `cpus` by an idle pod that belongs to no job."""
    pods = f"/api/v1/namespaces/{cluster.namespace}/pods"
    container = {
        "name": "other-load",
        "image": cluster.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "3600"],
        "resources": {"requests": {"cpu": f"{round(cpus * 1000)}m"}},
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    await cluster.request(
        "POST", pods, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other-load"}, "spec": spec}
    )
    try:
        yield
    finally:
        await cluster.request("DELETE", f"{pods}/other-load")


async def test_two_jobs_shrink_to_make_room_for_a_third(
    cluster: Cluster, redis_service: RedisService, namespace: str
) -> None:
    """The first has 10 trainers, the second 8, the third is pending; both shrink until none is pending."""
    backend = cluster.backend()
    cpus, reserved = await _cpus(backend)
    assert reserved <= OTHER_LOAD * cpus, f"the cluster is too busy for this test: {reserved:g} of {cpus:g} CPUs"
    async with _other_load(cluster, OTHER_LOAD * cpus - reserved), connect(redis_service.url) as client:
        tutorial = Tutorial(backend, client, namespace, redis_service.url_in_cluster, RescalingRules(max_load=MAX_LOAD))
        await tutorial.play(cpus, OTHER_LOAD)


async def test_the_same_comes_out_by_kubectl_alone(
    cluster: Cluster, redis_service: RedisService, namespace: str, tmp_path: Path
) -> None:
    """TrainingJobs and the controller in place of commands: 10 → 3 or 4, 8 → 4 or 3, 0 → 4."""
    backend = cluster.backend()
    cpus, reserved = await _cpus(backend)
    assert reserved <= OTHER_LOAD * cpus, f"the cluster is too busy for this test: {reserved:g} of {cpus:g} CPUs"

    async def submit(name: str) -> None:
        bounds, share = SIZES[name]
        resources = {"requests": {"cpu": f"{round(share * cpus * 1000)}m"}}
        trainer = {"entrypoint": "sleep 3600", "resources": resources}
        text = manifest(cluster, name, tmp_path, least=bounds.min, most=bounds.max, **trainer)
        await asyncio.to_thread(kubectl, cluster, "create", "-f", "-", text=text)

    flags = ("--max-load", str(MAX_LOAD), "--interval", "5")
    with trainingjobs_served(cluster), controller(cluster, redis_service, *flags, namespace=namespace):
        async with _other_load(cluster, OTHER_LOAD * cpus - reserved), connect(redis_service.url) as client:
            log = Tutorial(backend, client, namespace, redis_service.url_in_cluster, RescalingRules())
            try:
                await submit("example")
                await log.shows(1, 0, "example:10")
                await submit("example1")
                await log.shows(2, 0, r"example:10\|example1:8")
                await submit("example2")
                await log.shows(3, 0, r"example:[34]\|example1:[34]\|example2:4")
                sizes = (await asyncio.to_thread(kubectl, cluster, "get", "trainingjobs", "--no-headers")).splitlines()
                assert {tuple(line.split()[:3]) for line in sizes} >= {("example2", "running", "4")}
                assert events(cluster, "example")["Resized"].startswith("resized from ")
            finally:
                await asyncio.to_thread(kubectl, cluster, "delete", "trainingjobs", "--all")
