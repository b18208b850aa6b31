"""A real Kueue controller for one namespace of the cluster, and its queues. `make kueue` builds it.

It runs on this machine, where the API server reaches its webhooks; they are called for this namespace alone.
"""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from support.cluster.cluster import Cluster
from support.network.certificates import Authority
from support.network.ports import free_ports
from support.paths import ROOT

from edl_runtime.backends.kubernetes.pod_status import condition

BUILT = ROOT / ".kueue"

READY_WITHIN_S = 120.0

POD = {"cpu": "20m"}
"""What a pod of the tests requests: a queue's quota is counted in such pods."""

_API = "/apis/kueue.x-k8s.io/v1beta2"
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_WEBHOOKS = "/apis/admissionregistration.k8s.io/v1"
_METRICS = "/etc/kueue/metrics"
_SEES_CERTIFICATES = (
    *("unshare", "--map-root-user", "--mount", "sh", "-c"),
    f'mount -t tmpfs none /etc && mkdir -p {_METRICS} && ln -s "$0" {_METRICS}/certs && exec "$@"',
)
"""Runs a command that finds a folder's certificates where Kueue has those of its metrics, whatever it is configured."""

_HAVE_FINALIZERS = ("workloads", "localqueues", "clusterqueues", "resourceflavors")


async def unavailable_reason(cluster: Cluster) -> str:
    """Return why there is no Kueue for tests, empty if there is one."""
    if not (BUILT / "kueue").exists():
        return "no Kueue here: `make kueue` builds it where Go is to be had"
    groups = (await _request(cluster, "GET", "/apis"))["groups"]
    if any(group["name"] == "kueue.x-k8s.io" for group in groups):
        return "this cluster has a Kueue of its own"
    return ""


@contextmanager
def running_kueue(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Run Kueue for the cluster's namespace, with a log in `folder`. Afterwards the cluster knows nothing of it."""
    authority = Authority(folder / "authority")
    certificate = authority.sign("127.0.0.1")
    certificate.cert.rename(folder / "tls.crt")
    certificate.key.rename(folder / "tls.key")
    webhooks_at, health_at = free_ports(2)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(_config(cluster.namespace, folder, webhooks_at, health_at)))
    try:
        asyncio.run(_define(cluster, _webhooks(cluster.namespace, webhooks_at, authority.ca.read_bytes())))
        with (folder / "log").open("wb") as log:
            environ = {**os.environ, "KUBECONFIG": cluster.kubeconfig}
            command = [*_SEES_CERTIFICATES, folder, BUILT / "kueue", "--config", config]
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{health_at}/readyz", folder / "log")
            asyncio.run(
                cluster.request("POST", f"{_API}/resourceflavors", _object("ResourceFlavor", cluster.namespace))
            )
            yield
        finally:
            process.terminate()
            process.wait()
    finally:
        asyncio.run(_forget(cluster))


async def make_queue(cluster: Cluster, name: str, *, pods: int) -> None:
    """Make a LocalQueue of the namespace with quota for so many pods. Within it, higher priorities preempt lower."""
    quota = {"name": "cpu", "nominalQuota": f"{20 * pods}m"}
    flavors = [{"name": cluster.namespace, "resources": [quota]}]
    spec = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": ["cpu"], "flavors": flavors}],
    }
    queue = f"{cluster.namespace}-{name}"
    await _request(cluster, "POST", f"{_API}/clusterqueues", {**_object("ClusterQueue", queue), "spec": spec})
    local = {**_object("LocalQueue", name), "spec": {"clusterQueue": queue}}
    await _request(cluster, "POST", f"{_API}/namespaces/{cluster.namespace}/localqueues", local)


async def set_quota(cluster: Cluster, name: str, *, pods: int) -> None:
    """Change a queue's quota."""
    quota = "/spec/resourceGroups/0/flavors/0/resources/0/nominalQuota"
    change = [{"op": "replace", "path": quota, "value": f"{20 * pods}m"}]
    path = f"{_API}/clusterqueues/{cluster.namespace}-{name}"
    await _request(cluster, "PATCH", path, change, content="application/json-patch+json")


async def _request(cluster: Cluster, method: str, path: str, body: Any = None, **more: Any) -> Any:
    """As that of the cluster; again while the API server begins to serve a new kind of objects."""
    async with asyncio.timeout(READY_WITHIN_S):
        while True:
            try:
                return await cluster.request(method, path, body, **more)
            except RuntimeError as error:
                if error.args[0].get("code") != 429:
                    raise
            await asyncio.sleep(0.2)


def _object(kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}}


def _config(namespace: str, folder: Path, webhooks_at: int, health_at: int) -> dict[str, Any]:
    """Return Kueue's configuration: what it has by default, for one namespace, and no server beyond loopback."""
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health_at}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": webhooks_at, "certDir": str(folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "managedJobsNamespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "integrations": {"frameworks": ["batch/job", "pod", "deployment"]},
        "featureGates": {"VisibilityOnDemand": False},
    }


def _webhooks(namespace: str, port: int, authority: bytes) -> list[dict[str, Any]]:
    """Return Kueue's webhooks, at this machine's port and for one namespace."""
    found = list(yaml.safe_load_all((BUILT / "webhook/manifests.yaml").read_text()))
    for configuration in found:
        configuration["metadata"]["name"] = f"kueue-{configuration['metadata']['name']}"
        for webhook in configuration["webhooks"]:
            url = f"https://127.0.0.1:{port}{webhook['clientConfig']['service']['path']}"
            webhook["clientConfig"] = {"url": url, "caBundle": base64.b64encode(authority).decode()}
            webhook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    return found


def _definitions() -> list[dict[str, Any]]:
    """Return Kueue's kinds of objects in the version that it stores, which needs no conversion."""
    found = [yaml.safe_load(file.read_text()) for file in sorted((BUILT / "bases").glob("*.yaml"))]
    for definition in found:
        definition["spec"]["versions"] = [one for one in definition["spec"]["versions"] if one["storage"]]
    return found


async def _define(cluster: Cluster, webhooks: list[dict[str, Any]]) -> None:
    for definition in _definitions():
        await _request(cluster, "POST", _DEFINITIONS, definition)
    for definition in _definitions():
        path = f"{_DEFINITIONS}/{definition['metadata']['name']}"
        async with asyncio.timeout(READY_WITHIN_S):
            while not condition(await _request(cluster, "GET", path), "Established"):  # noqa: ASYNC110 -- no event
                await asyncio.sleep(0.1)
    for webhook in webhooks:
        await _request(cluster, "POST", f"{_WEBHOOKS}/{webhook['kind'].lower()}s", webhook)


async def _forget(cluster: Cluster) -> None:
    """Delete Kueue's objects, of which none may wait for it."""
    for configuration in _webhooks(cluster.namespace, 0, b""):
        path = f"{_WEBHOOKS}/{configuration['kind'].lower()}s/{configuration['metadata']['name']}"
        await _request(cluster, "DELETE", path)
    for kind in _HAVE_FINALIZERS:
        for one in (await _request(cluster, "GET", f"{_API}/{kind}")).get("items", []):
            space = f"/namespaces/{one['metadata']['namespace']}" if "namespace" in one["metadata"] else ""
            path, free = f"{_API}{space}/{kind}/{one['metadata']['name']}", {"metadata": {"finalizers": None}}
            await _request(cluster, "PATCH", path, free, content="application/merge-patch+json")
    for definition in _definitions():
        await _request(cluster, "DELETE", f"{_DEFINITIONS}/{definition['metadata']['name']}")


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except OSError:
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
