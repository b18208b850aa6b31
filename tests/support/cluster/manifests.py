"""The manifests in deploy/, applied to a namespace of a test, and pods with a command."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from support.cluster.cluster import Cluster
from support.paths import DEPLOY

WITHIN_S = 120.0
"""Longest wait for a pod, the pull of its image included."""

_PATHS = {
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Deployment": "/apis/apps/v1/namespaces/{namespace}/deployments",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    "PersistentVolume": "/api/v1/persistentvolumes",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "ResourceQuota": "/api/v1/namespaces/{namespace}/resourcequotas",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
    "Secret": "/api/v1/namespaces/{namespace}/secrets",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "TrainingJob": "/apis/paddlepaddle.org/v1/namespaces/{namespace}/trainingjobs",
    "StatefulSet": "/apis/apps/v1/namespaces/{namespace}/statefulsets",
}

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
"""Labels of a namespace that enforces the PodSecurity level `restricted`."""

_POD_RESTRICTED = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
_CONTAINER_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def manifests(file: str, namespace: str) -> list[dict[str, Any]]:
    """Return the objects of a file in deploy/, with its namespaces `edl` and `airflow` replaced by `namespace`."""
    text = (DEPLOY / file).read_text()
    return list(yaml.safe_load_all(re.sub("namespace: (edl|airflow)\n", f"namespace: {namespace}\n", text)))


def secret(name: str, **texts: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": texts}


def redis_volume(home: Cluster, folder: Path) -> dict[str, Any]:
    """Return a volume for Redis's claim, for clusters without a provisioner."""
    folder.mkdir()
    folder.chmod(0o777)
    claim = {"namespace": home.namespace, "name": "data-edl-redis-0"}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"redis-{home.namespace}"},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"kind": "PersistentVolumeClaim", "apiVersion": "v1", **claim},
            "hostPath": {"path": str(folder)},
        },
    }


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the container of the StatefulSet or Deployment among them."""
    (found,) = [one for one in objects if one["kind"] in ("StatefulSet", "Deployment")]
    first: dict[str, Any] = found["spec"]["template"]["spec"]["containers"][0]
    return first


def path_of(cluster: Cluster, kind: str, name: str = "") -> str:
    path = _PATHS[kind].format(namespace=cluster.namespace)
    return f"{path}/{name}" if name else path


async def create(cluster: Cluster, *objects: dict[str, Any]) -> None:
    for one in objects:
        await cluster.request("POST", path_of(cluster, one["kind"]), one)


async def remove(cluster: Cluster, *objects: dict[str, Any]) -> None:
    for one in objects:
        await cluster.request("DELETE", path_of(cluster, one["kind"], one["metadata"]["name"]))


async def account_token(cluster: Cluster, name: str) -> str:
    """Return a token of a service account."""
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    answer = await cluster.request("POST", f"{path_of(cluster, 'ServiceAccount', name)}/token", request)
    return str(answer["status"]["token"])


@asynccontextmanager
async def created(cluster: Cluster, *objects: dict[str, Any]) -> AsyncIterator[None]:
    """Create objects for the block."""
    await create(cluster, *objects)
    try:
        yield
    finally:
        await remove(cluster, *objects)


async def ready_pod(cluster: Cluster, labels: str, *, other_than: str = "") -> dict[str, Any]:
    """Return the pod with the labels once it is ready. `other_than`: the uid of a pod that is being replaced."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        pods = (await cluster.request("GET", f"{path_of(cluster, 'Pod')}?labelSelector={labels}"))["items"]
        for pod in pods:
            conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", ())}
            if conditions.get("Ready") == "True" and pod["metadata"]["uid"] != other_than:
                return dict(pod)
        if time.monotonic() > deadline:
            raise AssertionError(f"no pod {labels} is ready within {WITHIN_S:.0f} s: {[pod['status'] for pod in pods]}")
        await asyncio.sleep(0.2)


async def run_pod(
    cluster: Cluster, name: str, command: list[str], env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a command in a pod of the runtime's image; return its exit status and output."""
    container = {
        "name": "main",
        "image": cluster.image,
        "command": ["sh", "-c", 'exec "$@" >/dev/termination-log 2>&1', "sh", *command],
        "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
        "resources": {"requests": {"cpu": "20m"}},
        "securityContext": _CONTAINER_RESTRICTED,
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": _POD_RESTRICTED,
        "containers": [container],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    await create(cluster, pod)
    deadline = time.monotonic() + WITHIN_S
    while True:
        status = (await cluster.request("GET", path_of(cluster, "Pod", name)))["status"]
        if status.get("phase") in ("Succeeded", "Failed"):
            ended = status["containerStatuses"][0]["state"]["terminated"]
            return ended["exitCode"], ended.get("message", "")
        if time.monotonic() > deadline:
            raise AssertionError(f"pod {name} has not ended within {WITHIN_S:.0f} s: {status}")
        await asyncio.sleep(0.2)
