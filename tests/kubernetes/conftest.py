"""Fixtures of the tests on a real cluster."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import skip_on_a_laptop
from support.cluster.cluster import PADDLE_IMAGE, Cluster, own_namespace
from support.cluster.manifests import RESTRICTED
from support.cluster.pod_faults import kubeconfig_with, server_of, without_leftovers
from support.network.proxy import Proxy, running_proxy
from support.slow_redis import redis_may_be_slow  # noqa: F401

from edl_runtime.backends.kubernetes.backend import KubernetesBackend


@pytest.fixture(scope="session")
def paddle_image() -> str:
    """An image of the runtime with Paddle that the cluster has."""
    image = os.environ.get(PADDLE_IMAGE, "")
    if not image:
        skip_on_a_laptop(f"{PADDLE_IMAGE} names no image with Paddle that the cluster has; see deploy/Dockerfile")
    return image


@pytest.fixture(scope="module")
def restricted(cluster: Cluster) -> Iterator[Cluster]:
    """A namespace that enforces the PodSecurity level `restricted`."""
    with own_namespace(cluster.kubeconfig, cluster.image, RESTRICTED) as made:
        yield made


@pytest.fixture
def home(cluster: Cluster) -> Iterator[Cluster]:
    """A namespace of the test's own, with all rights."""
    with own_namespace(cluster.kubeconfig, cluster.image) as made:
        yield made


@pytest.fixture
async def backend(cluster: Cluster, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    """A backend whose pods see the test's `tmp_path`; afterwards no object of its jobs remains."""
    made = cluster.backend(tmp_path)
    async with without_leftovers(made, cluster):
        yield made


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that this process sends to the API server, with "(dry run)" for those that change nothing."""
    from kubernetes_asyncio.client import ApiClient

    sent: list[str] = []
    call_api = ApiClient.call_api

    def counted(self: ApiClient, path: str, method: str, **more: Any) -> Any:
        is_dry_run = "dryRun" in dict(more.get("query_params", ()))
        sent.append(f"{method} {path}{' (dry run)' if is_dry_run else ''}")
        return call_api(self, path, method, **more)

    monkeypatch.setattr(ApiClient, "call_api", counted)
    return sent


@pytest.fixture
def proxied(cluster: Cluster, tmp_path: Path) -> Iterator[tuple[Cluster, Proxy]]:
    """The same cluster through a proxy."""
    with running_proxy(*server_of(cluster)) as proxy:
        proxied = Cluster(kubeconfig_with(cluster, tmp_path / "kubeconfig", port=proxy.port), cluster.image)
        proxied.namespace = cluster.namespace
        yield proxied, proxy
