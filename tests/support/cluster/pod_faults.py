"""Faults of pods and of their namespace: evictions, quotas, priorities, weak service accounts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from support.cluster.cluster import Cluster
from support.cluster.manifests import account_token, create, created, manifests, path_of

from edl_runtime.backends.interface import Backend


@asynccontextmanager
async def without_leftovers(backend: Backend, cluster: Cluster) -> AsyncIterator[Backend]:
    """Yield a backend; afterwards delete its jobs and check that no object of them remains."""
    yield backend
    for status in await backend.list():
        assert await backend.delete(status.name)
    assert await cluster.remaining_objects() == []


async def pods_of(cluster: Cluster, job: str) -> list[str]:
    """Return the names of a job's pods that are not terminating."""
    pods = await cluster.list_objects("pods", job)
    return sorted(pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"])


async def evict(cluster: Cluster, pod: str) -> bool:
    """Evict a pod, as `kubectl drain` does; False if a PodDisruptionBudget forbids it."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    try:
        await cluster.request("POST", f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}/eviction", eviction)
    except RuntimeError as error:
        if error.args[0].get("code") != 429:
            raise
        return False
    return True


@asynccontextmanager
async def priority_class(cluster: Cluster, value: int) -> AsyncIterator[str]:
    """Make a PriorityClass; yield its name."""
    name = f"{cluster.namespace}-{value}"
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": value}
    async with created(cluster, body):
        yield name


@asynccontextmanager
async def quota(cluster: Cluster, hard: dict[str, str]) -> AsyncIterator[None]:
    """Set a ResourceQuota on the namespace for the block."""
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tight"}, "spec": {"hard": hard}}
    path = path_of(cluster, "ResourceQuota", "tight")
    async with created(cluster, body):
        async with asyncio.timeout(120):
            while (await cluster.request("GET", path)).get("status", {}).get("hard") != hard:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield


def kubeconfig_with(cluster: Cluster, file: Path, *, port: int = 0, token: str = "") -> str:
    """Write a kubeconfig of the cluster with another local port or another token."""
    config, target, user = _kubeconfig(cluster)
    if port:
        target.setdefault("tls-server-name", urlsplit(target["server"]).hostname)
        target["server"] = f"https://127.0.0.1:{port}"
    if token:
        user["user"] = {"token": token}
    file.write_text(yaml.safe_dump(config))
    return str(file)


async def limited_by_role(cluster: Cluster, folder: Path) -> Cluster:
    """Make role.yaml's objects, and return the same namespace with the token of its service account."""
    await create(cluster, *manifests("role.yaml", cluster.namespace))
    token = await account_token(cluster, "edl")
    made = Cluster(kubeconfig_with(cluster, folder / "kubeconfig", token=token), cluster.image)
    made.namespace = cluster.namespace
    return made


def server_of(cluster: Cluster) -> tuple[str, int]:
    """Return host and port of the cluster's API server."""
    url = urlsplit(_kubeconfig(cluster)[1]["server"])
    return url.hostname or "", url.port or 443


def _kubeconfig(cluster: Cluster) -> tuple[Any, Any, Any]:
    """Return the cluster's kubeconfig, and its current context's cluster and user."""
    config = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    context = next(one["context"] for one in config["contexts"] if one["name"] == config["current-context"])
    target = next(one["cluster"] for one in config["clusters"] if one["name"] == context["cluster"])
    return config, target, next(one for one in config["users"] if one["name"] == context["user"])


async def token_of(cluster: Cluster, rights: Mapping[str, Sequence[str]]) -> str:
    """Return the token of a service account with `rights` in the namespace: verbs by "group/resource"."""
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for (group, _, resource), verbs in ((what.partition("/"), verbs) for what, verbs in rights.items())
    ]
    metadata = {"name": f"weak-{secrets.token_hex(3)}"}
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    subject = {"kind": "ServiceAccount", "namespace": cluster.namespace, **metadata}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", **metadata}
    await create(
        cluster,
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {**rbac, "kind": "Role", "metadata": metadata, "rules": rules},
        {**rbac, "kind": "RoleBinding", "metadata": metadata, "roleRef": role, "subjects": [subject]},
    )
    return await account_token(cluster, metadata["name"])
