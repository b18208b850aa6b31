"""The Helm chart, installed in a namespace with the PodSecurity level `restricted`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster.cluster import REDIS_IMAGE, Cluster
from support.cluster.manifests import create, ready_pod, redis_volume, run_pod, secret
from support.cluster.trainingjobs import kubectl, trainingjobs_served
from support.helm import CHART, helm, values

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

TOKENS = {"edl-discovery": "70c3a", "edl-monitor": "5c4a9e"}

ASKS = """
import sys, time, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {sys.argv[2]}"})
deadline = time.monotonic() + 60
while True:
    try:
        answer = urllib.request.urlopen(request, timeout=30)
        print(answer.status, "edl_jobs" in answer.read().decode())
        break
    except urllib.error.HTTPError as error:
        print(error.code)
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.2)
"""
"""Prints the status of an answer to a request with a token, once its Service can be reached."""


@pytest.fixture
def installed(restricted: Cluster, tmp_path: Path) -> Iterator[list[str]]:
    """The chart with everything of one namespace; the options that chose it."""
    helm("version")  # where there is none, this skips before anything is made
    repository, tag = restricted.image.rsplit(":", 1)
    options = [
        f"--namespace={restricted.namespace}",
        *values(image__repository=repository, image__tag=tag, image__pullPolicy="IfNotPresent"),
        *values(redis__image=REDIS_IMAGE, airflow__namespace=restricted.namespace, dashboard__create="true"),
        *("--wait", "--timeout=300s", f"--kubeconfig={restricted.kubeconfig}"),
    ]
    secrets = [secret(name, token=token) for name, token in TOKENS.items()]
    volume = redis_volume(restricted, tmp_path / "data")
    asyncio.run(create(restricted, volume, secret("edl-redis", password="5ecae7"), *secrets))
    with trainingjobs_served(restricted):
        helm("install", "edl", str(CHART), "--skip-crds", *options)
        yield options
        helm("uninstall", "edl", "--wait", *options[:1], *options[-1:])
    kubectl(restricted, "delete", "persistentvolumeclaims", "--all")
    kubectl(restricted, "delete", "secrets", "edl-redis", *TOKENS)
    kubectl(restricted, "delete", "persistentvolume", volume["metadata"]["name"])


async def answer(home: Cluster, name: str, address: str, token: str) -> str:
    status, output = await run_pod(home, name, ["python", "-c", ASKS, address, token])
    assert status == 0, output
    return output.strip()


async def test_the_chart_runs_all_that_it_names(restricted: Cluster, installed: list[str]) -> None:
    """Discovery and metrics ask for their tokens, a controller leads, and an upgrade changes the windows."""
    for name in ("edl-redis", "edl-discovery", "edl-controller", "edl-monitor"):
        await ready_pod(restricted, f"app.kubernetes.io/name={name}")
    pools, metrics = "http://edl-discovery:8000/v1/pools", "http://edl-monitor:9400/metrics"
    assert await answer(restricted, "guest", pools, "wrong") == "401"
    assert (await answer(restricted, "student", pools, TOKENS["edl-discovery"])).startswith("200")
    assert await answer(restricted, "stranger", metrics, "wrong") == "401"
    assert await answer(restricted, "prometheus", metrics, TOKENS["edl-monitor"]) == "200 True"
    lease = await asyncio.to_thread(
        kubectl, restricted, "wait", "--for=jsonpath={.spec.holderIdentity}", "--timeout=120s", "lease/edl-controller"
    )
    assert "condition met" in lease

    night = json.dumps({"default": {"cluster": "40%"}})
    await asyncio.to_thread(
        helm, "upgrade", "edl", str(CHART), "--skip-crds", *installed, f"--set-json=controller.windows={night}"
    )
    windows = await asyncio.to_thread(kubectl, restricted, "get", "configmap", "edl-windows", "-o", "yaml")
    assert "cluster: 40%" in windows


async def test_an_upgrade_keeps_what_redis_has(restricted: Cluster, installed: list[str]) -> None:
    """With values that restart Redis, more objects and fewer; a rollback brings the first ones back."""
    redis = ("exec", "edl-redis-0", "--", "redis-cli", "--raw")

    async def upgraded(*command: str) -> str:
        await asyncio.to_thread(helm, *command)
        return await asyncio.to_thread(kubectl, restricted, *redis, "get", "kept")

    await ready_pod(restricted, "app.kubernetes.io/name=edl-redis")
    assert "OK" in await asyncio.to_thread(kubectl, restricted, *redis, "set", "kept", "7")
    first = await asyncio.to_thread(kubectl, restricted, "get", "pod", "edl-redis-0", "-o", "jsonpath={.metadata.uid}")
    changed = values(
        redis__resources__limits__memory="2Gi",
        registryNamespace="other",
        dashboard__create="false",
        role__create="false",
    )
    assert (await upgraded("upgrade", "edl", str(CHART), "--skip-crds", *installed, *changed)).strip() == "7"
    second = await asyncio.to_thread(kubectl, restricted, "get", "pod", "edl-redis-0", "-o", "jsonpath={.metadata.uid}")
    assert first != second, "it was restarted"
    names = await asyncio.to_thread(kubectl, restricted, "get", "deployments", "-o", "name")
    assert "edl-monitor" not in names
    namespace, *_, wait, limit, config = installed
    assert (await upgraded("rollback", "edl", "1", namespace, wait, limit, config)).strip() == "7"
    assert "edl-monitor" in await asyncio.to_thread(kubectl, restricted, "get", "deployments", "-o", "name")
