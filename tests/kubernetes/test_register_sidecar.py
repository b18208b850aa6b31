"""deploy/register.yaml beside a server in pods, for which a teacher of ours stands in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from support.backends.jobs import eventually
from support.cluster.cluster import Cluster, RedisService
from support.cluster.manifests import create, path_of, secret
from support.paths import DEPLOY, TESTS
from support.students.readers import Batches, reader_of

from edl_airflow.operators.job_specs import registration_job_spec
from edl_runtime.distill import Discovered
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN = "a-token-of-these-tests"
WITHIN_S = 120.0
POOL = "images"
PASSWORD = "5ecae7"


@pytest.fixture
def redis(home: Cluster) -> Iterator[RedisService]:
    """A Redis in the test's own namespace, by the name and Secret of deploy/redis.yaml."""
    with RedisService(home, PASSWORD) as made:
        yield made


def server(image: str) -> dict[str, Any]:
    """Return the Deployment that somebody already has: two pods of a server with one model."""
    labels = {"app": "triton"}
    container = {
        "name": "triton",
        "image": image,
        "args": ["teacher", "--host=0.0.0.0", "--port=8000", "--model=support.models:slow"],
        "workingDir": str(TESTS),
        "env": [{"name": "EDL_TEACHER_TOKEN", "value": TOKEN}],
        "volumeMounts": [{"name": "tests", "mountPath": str(TESTS), "readOnly": True}],
    }
    volumes = [{"name": "tests", "hostPath": {"path": str(TESTS)}}]
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "triton"}, "spec": spec}


def patch(image: str) -> dict[str, Any]:
    """Return the patch for the stand-in: its image, its model, its token."""
    made: dict[str, Any] = yaml.safe_load((DEPLOY / "register.yaml").read_text())
    (_, sidecar) = made["spec"]["template"]["spec"]["containers"]
    sidecar["image"] = image
    sidecar["args"] = [word.replace("=resnext", "=teacher") for word in sidecar["args"]]
    sidecar["env"].append({"name": "EDL_TEACHER_TOKEN", "value": TOKEN})
    return made


async def test_servers_in_pods_join_a_pool_and_a_rollout_loses_nothing(home: Cluster, redis: RedisService) -> None:
    """Each pod is a teacher by its own address; all are replaced while a student reads, which gets each answer once."""
    settings = RuntimeSettings(redis_url=redis.url, teacher_token=TOKEN, teacher_wait_s=WITHIN_S)
    await create(home, secret("edl-redis", password=PASSWORD), server(home.image))
    path = path_of(home, "Deployment", "triton")
    content = "application/strategic-merge-patch+json"
    await home.request("PATCH", path, patch(home.image), content=content)

    batches = Batches(200, seconds=0.01)
    epochs: list[list[object]] = []
    enough = threading.Event()

    def study() -> None:
        with reader_of(batches, Discovered(POOL), settings) as reader:
            while not enough.is_set():
                epochs.append(list(reader))

    async with connect(redis.url) as client:
        directory = Directory(client, settings.namespace)

        async def two_new(old: frozenset[str]) -> bool:
            """Whether two pods are registered, none of them an old one, and they are those that are ready."""
            found = {member.address for member in await directory.members(POOL)}
            pods = (await home.request("GET", f"{path_of(home, 'Pod')}?labelSelector=app=triton"))["items"]
            ready = {f"oip+http://{pod['status'].get('podIP')}:8000/teacher" for pod in pods if is_ready(pod)}
            return len(found) == 2 and not found & old and found == ready

        await eventually(lambda: two_new(frozenset()), "two servers in the pool", WITHIN_S)
        before = frozenset(member.address for member in await directory.members(POOL))
        studying = asyncio.create_task(asyncio.to_thread(study))
        try:
            annotation = {"metadata": {"annotations": {"restarted": "once"}}}
            await home.request("PATCH", path, {"spec": {"template": annotation}}, content=content)
            await eventually(lambda: two_new(before), "two other servers in the pool", WITHIN_S)
            seen = len(epochs)

            async def more() -> bool:
                return len(epochs) > seen + 1

            await eventually(more, "an epoch by the new servers", WITHIN_S)
        finally:
            enough.set()
            await studying
    for epoch in epochs:
        batches.check(epoch)


async def test_a_dags_registration_runs_in_a_pod_and_leaves_the_pool_when_it_is_stopped(
    home: Cluster, redis: RedisService
) -> None:
    """By the address of a Service, under which the server was there before."""
    service = {"selector": {"app": "triton"}, "ports": [{"port": 8000}]}
    metadata = {"name": "triton"}
    await create(
        home, server(home.image), {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service}
    )
    address = f"oip+http://triton.{home.namespace}.svc:8000/teacher"
    spec = registration_job_spec(POOL, [address], namespace="default")
    backend = home.backend()
    await backend.submit(
        spec, token="mine", secrets={"EDL_REDIS_URL": redis.url_in_cluster, "EDL_TEACHER_TOKEN": TOKEN}
    )
    async with connect(redis.url) as client:

        async def registered() -> list[str]:
            return [member.address for member in await Directory(client, "default").members(POOL)]

        async def joined() -> bool:
            return await registered() == [address]

        await eventually(joined, "the server in the pool", WITHIN_S)
        await backend.delete(spec.name)
        assert await registered() == []


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
