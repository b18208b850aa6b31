"""`kubectl delete namespace` with a training in it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from support.backends.jobs import eventually
from support.cluster.cluster import Cluster, RedisService, own_namespace
from support.cluster.controller_process import running
from support.cluster.manifests import container, create, manifests, ready_pod, secret
from support.cluster.trainingjobs import WITHIN_S, forget_trainingjobs, manifest, trainingjobs_served, wait_for_files

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


@pytest.fixture
def going(cluster: Cluster) -> Iterator[Cluster]:
    """A namespace to delete, with the resource definition; what a failed test has left there is removed."""
    with trainingjobs_served(cluster), own_namespace(cluster.kubeconfig, cluster.image) as made, ExitStack() as stack:
        stack.callback(forget_trainingjobs, made)
        yield made


async def test_a_namespace_goes_with_its_trainings(going: Cluster, redis_service: RedisService, tmp_path: Path) -> None:
    """Each writes a last checkpoint before."""
    async with running(going, redis_service):
        await delete_with_training(going, tmp_path)


def test_a_namespace_goes_with_its_trainings_and_their_controller(going: Cluster, tmp_path: Path) -> None:
    """Its pods are stopped with all others, and end last; their Redis may be gone by then."""
    objects = manifests("controller.yaml", going.namespace)
    container(objects)["image"] = going.image
    env = {one["name"]: one for one in container(objects)["env"]}
    env["EDL_REDIS_URL"]["value"] = env["EDL_REDIS_URL"]["value"].replace("redis.edl:", f"redis.{going.namespace}:")
    env["EDL_MANIFEST_VOLUMES"]["value"] = "hostPath"  # the test reads what pods write

    async def delete() -> None:
        await create(going, secret("edl-redis", password="5ecae7"), *objects)
        await ready_pod(going, "app.kubernetes.io/name=edl-controller")
        await delete_with_training(going, tmp_path)

    with RedisService(going, "5ecae7"):
        asyncio.run(delete())


async def delete_with_training(going: Cluster, out: Path) -> None:
    async def is_gone() -> bool:
        found = await going.request("GET", f"/api/v1/namespaces/{going.namespace}")
        return bool(found["kind"] == "Status")

    await create(going, yaml.safe_load(manifest(going, "example", out, instances=2)))
    await asyncio.to_thread(wait_for_files, out, "up-example-0", "up-example-1")
    await going.request("DELETE", f"/api/v1/namespaces/{going.namespace}")
    await eventually(is_gone, "the namespace gone", WITHIN_S)
    wait_for_files(out, "checkpoint-example-0", "checkpoint-example-1")
