"""deploy/redis.yaml and deploy/discovery.yaml in a namespace with the PodSecurity level `restricted`.

EDL_TEST_REDIS_IMAGE names an image with a redis-server that the cluster has, or can pull: see services/Dockerfile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster.cluster import REDIS_IMAGE, Cluster
from support.cluster.manifests import (
    container,
    create,
    created,
    manifests,
    path_of,
    ready_pod,
    redis_volume,
    run_pod,
    secret,
)

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

PASSWORD = "5ecae7"
TOKEN = "70c3a"

WAITS_FOR_SERVICE = """
import socket, sys, time
from urllib.parse import urlsplit
deadline = time.monotonic() + 60
while True:
    try:
        socket.create_connection((urlsplit(sys.argv[1]).hostname, urlsplit(sys.argv[1]).port), 2).close()
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.2)
"""
"""Waits until the Service at a URL is reachable, a moment after its pod is ready."""

RUNS_COMMAND = f"""{WAITS_FOR_SERVICE}
import redis
try:
    print(getattr(redis.Redis.from_url(sys.argv[1]), sys.argv[2])(*sys.argv[3:]))
except redis.AuthenticationError as error:
    sys.exit(f"refused: {{error}}")
"""
"""Runs one command in the Redis at a URL and prints the answer."""

LISTS_POOLS = f"""{WAITS_FOR_SERVICE}
import urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], headers={{"Authorization": f"Bearer {{sys.argv[2]}}"}})
try:
    print(urllib.request.urlopen(request, timeout=30).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.fixture
async def redis(restricted: Cluster, tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    """The pod of a ready Redis."""
    objects = manifests("redis.yaml", restricted.namespace)
    container(objects)["image"] = REDIS_IMAGE
    objects = [redis_volume(restricted, tmp_path / "data"), secret("edl-redis", password=PASSWORD), *objects]
    async with created(restricted, *objects):
        yield await ready_pod(restricted, "app.kubernetes.io/name=edl-redis")


def url(password: str = "") -> str:
    return f"redis://{f':{password}@' if password else ''}edl-redis:6379/0"


async def run_command(home: Cluster, name: str, address: str, *command: str) -> tuple[int, str]:
    status, output = await run_pod(home, name, ["python", "-c", RUNS_COMMAND, address, *command])
    return status, output.strip()


async def test_redis_and_discovery_require_credentials_and_redis_keeps_its_data(
    restricted: Cluster, redis: dict[str, Any]
) -> None:
    """Through their Services; data written before Redis's pod was deleted is in the next pod."""
    for name, password in (("anonymous", ""), ("wrong", "wrong")):
        status, output = await run_command(restricted, name, url(password), "get", "key")
        assert (status, output[:8]) == (1, "refused:")
    assert await run_command(restricted, "writer", url(PASSWORD), "set", "key", "kept") == (0, "True")
    await restricted.request("DELETE", path_of(restricted, "Pod", redis["metadata"]["name"]))
    await ready_pod(restricted, "app.kubernetes.io/name=edl-redis", other_than=redis["metadata"]["uid"])
    assert await run_command(restricted, "reader", url(PASSWORD), "get", "key") == (0, "b'kept'")
    await check_discovery_requires_its_token(restricted)


async def check_discovery_requires_its_token(home: Cluster) -> None:
    """Start discovery beside that Redis and send requests with a wrong and the right token."""
    objects = [secret("edl-discovery", token=TOKEN), *manifests("discovery.yaml", home.namespace)]
    container(objects)["image"] = home.image
    await create(home, *objects)
    await ready_pod(home, "app.kubernetes.io/name=edl-discovery")
    address = "http://edl-discovery:8000/v1/pools"
    for name, token, answer in (("guest", "wrong", "401"), ("student", TOKEN, "200")):
        assert await run_pod(home, name, ["python", "-c", LISTS_POOLS, address, token]) == (0, f"{answer}\n")
