"""What tests do to pods and to their namespace, and what they count afterwards."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from support.cluster.cluster import Cluster

from edl_runtime.backends.interface import Backend


@asynccontextmanager
async def leaving_nothing(backend: Backend, cluster: Cluster) -> AsyncIterator[Backend]:
    """Give a backend; delete its jobs afterwards, and count what is left of them."""
    yield backend
    for status in await backend.list():
        assert await backend.delete(status.name)
    assert await cluster.still_there() == []


async def pods_of(cluster: Cluster, job: str) -> list[str]:
    """Return the names of a job's pods that are not going already."""
    pods = await cluster.found("pods", job)
    return sorted(pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"])


async def evict(cluster: Cluster, pod: str) -> bool:
    """Evict a pod as a node does that is drained; False if a PodDisruptionBudget forbids it."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    try:
        await cluster.ask("POST", f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}/eviction", eviction)
    except RuntimeError as error:
        if error.args[0].get("code") != 429:
            raise
        return False
    return True


@asynccontextmanager
async def priority_class(cluster: Cluster, value: int) -> AsyncIterator[str]:
    """Give the name of a PriorityClass of the test's own."""
    name = f"{cluster.namespace}-{value}"
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": value}
    await cluster.ask("POST", path, body)
    try:
        yield name
    finally:
        await cluster.ask("DELETE", f"{path}/{name}")


@asynccontextmanager
async def quota(cluster: Cluster, hard: dict[str, str]) -> AsyncIterator[None]:
    """Limit what the namespace may have, once that is in force."""
    path = f"/api/v1/namespaces/{cluster.namespace}/resourcequotas"
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tight"}, "spec": {"hard": hard}}
    await cluster.ask("POST", path, body)
    async with asyncio.timeout(120):
        while (await cluster.ask("GET", f"{path}/tight")).get("status", {}).get("hard") != hard:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    try:
        yield
    finally:
        with suppress(RuntimeError):
            await cluster.ask("DELETE", f"{path}/tight")


def kubeconfig_with(cluster: Cluster, file: Path, *, port: int = 0, token: str = "") -> str:
    """Write a kubeconfig of the cluster that goes by another port of this machine, or as the owner of a token."""
    config, target, user = _kubeconfig(cluster)
    if port:
        target.setdefault("tls-server-name", urlsplit(target["server"]).hostname)
        target["server"] = f"https://127.0.0.1:{port}"
    if token:
        user["user"] = {"token": token}
    file.write_text(yaml.safe_dump(config))
    return str(file)


def server_of(cluster: Cluster) -> tuple[str, int]:
    """Return where the cluster's API server answers."""
    url = urlsplit(_kubeconfig(cluster)[1]["server"])
    return url.hostname or "", url.port or 443


def _kubeconfig(cluster: Cluster) -> tuple[Any, Any, Any]:
    """Return the cluster's kubeconfig, and what is in it of its current context's cluster and user."""
    config = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    context = next(one["context"] for one in config["contexts"] if one["name"] == config["current-context"])
    target = next(one["cluster"] for one in config["clusters"] if one["name"] == context["cluster"])
    return config, target, next(one for one in config["users"] if one["name"] == context["user"])


async def token_of(cluster: Cluster, rights: Mapping[str, Sequence[str]]) -> str:
    """Return the token of a service account that may do `rights` in the namespace: verbs by "group/resource"."""
    namespace = f"namespaces/{cluster.namespace}"
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for (group, _, resource), verbs in ((what.rpartition("/"), verbs) for what, verbs in rights.items())
    ]
    metadata = {"name": f"weak-{secrets.token_hex(3)}"}
    rbac = f"/apis/rbac.authorization.k8s.io/v1/{namespace}"
    who = {"kind": "ServiceAccount", "namespace": cluster.namespace, **metadata}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", **metadata}
    accounts = f"/api/v1/{namespace}/serviceaccounts"
    await cluster.ask("POST", accounts, {"metadata": metadata})
    await cluster.ask("POST", f"{rbac}/roles", {"metadata": metadata, "rules": rules})
    await cluster.ask("POST", f"{rbac}/rolebindings", {"metadata": metadata, "roleRef": role, "subjects": [who]})
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token: str = (await cluster.ask("POST", f"{accounts}/{metadata['name']}/token", asked))["status"]["token"]
    return token
