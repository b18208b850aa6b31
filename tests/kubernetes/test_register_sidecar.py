"""deploy/register.yaml beside a server in pods, for which a teacher of ours stands in."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import yaml
from support.backends.jobs import eventually
from support.cluster.cluster import Cluster, RedisService
from support.cluster.manifests import create, path_of, secret
from support.paths import DEPLOY, TESTS
from support.students.readers import Batches, reader_of

from edl_runtime.distill import Discovered
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN = "a-token-of-these-tests"
WITHIN_S = 120.0
POOL = "images"


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


async def test_servers_in_pods_join_a_pool_and_a_rollout_loses_nothing(home: Cluster) -> None:
    """Each pod is a teacher by its own address; all are replaced while a student reads, which gets each answer once."""
    password = "5ecae7"
    with RedisService(home, password) as redis:
        settings = RuntimeSettings(redis_url=redis.url, teacher_token=TOKEN, teacher_wait_s=WITHIN_S)
        await create(home, secret("edl-redis", password=password), server(home.image))
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


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
