"""A namespace in the real cluster that KUBECONFIG or --kubeconfig names, and servers in its pods."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.backends.kubernetes.kubeconfig import connect_by_kubeconfig
from edl_runtime.pods import Pod, Volume

IMAGE = "EDL_TEST_IMAGE"
"""The variable that names an image of the runtime that the cluster has."""

PADDLE_IMAGE = "EDL_TEST_PADDLE_IMAGE"
"""The variable that names one with Paddle in it."""

REDIS_IMAGE = os.environ.get("EDL_TEST_REDIS_IMAGE", "redis:7-alpine")

KINDS = {
    "deployments": "/apis/apps/v1",
    "jobs": "/apis/batch/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "pods": "/api/v1",
    "secrets": "/api/v1",
}
"""Kinds of objects that belong to a job, with their API paths."""

COLLECTED_WITHIN_S = 200.0
"""How long objects of a deleted job may remain: the cluster's garbage collector is slow."""

ANSWERS_WITHIN_S = 120.0
"""How long a server in a pod may take to answer, the pull of its image included."""


class Cluster:
    """A namespace in a cluster whose pods can use `image`."""

    def __init__(self, kubeconfig: str, image: str) -> None:
        self.kubeconfig = kubeconfig
        self.image = image
        self.namespace = f"edl-test-{secrets.token_hex(3)}"
        self.connect = connect_by_kubeconfig(kubeconfig)

    def backend(self, shared: Path | None = None, **more: Any) -> KubernetesBackend:
        """Return a backend whose pods see the folder `shared` under its own path."""
        volumes = []
        if shared:
            shared.chmod(0o777)
            volumes = [Volume(path=str(shared), source={"hostPath": {"path": str(shared)}})]
        defaults = Pod(**{"image": self.image, "resources": {"cpu": "20m"}, "volumes": volumes, **more})
        return KubernetesBackend(self.connect, namespace=self.namespace, defaults=defaults)

    def environ(self, **more: str) -> dict[str, str]:
        """Return the variables of this process, and those that lead the `edl` command to the namespace."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
        where = {"KUBECONFIG": self.kubeconfig, "EDL_BACKEND": "kubernetes", "EDL_KUBE_NAMESPACE": self.namespace}
        return {**clean, **where, "EDL_MANIFEST_VOLUMES": "hostPath", **more}  # tests read what pods write

    async def remaining_objects(self) -> list[str]:
        """Return the kind and name of all jobs' objects that the cluster has not collected in time."""
        deadline = time.monotonic() + COLLECTED_WITHIN_S
        while (objects := await self.objects()) and time.monotonic() < deadline:  # noqa: ASYNC110 -- no event
            await asyncio.sleep(0.2)
        return objects

    async def objects(self) -> list[str]:
        """Return the kind and name of all jobs' objects."""
        return [f"{kind} {one['metadata']['name']}" for kind in KINDS for one in await self.list_objects(kind)]

    async def list_objects(self, kind: str, job: str = "") -> list[dict[str, Any]]:
        """Return the objects of a kind of `KINDS` that belong to a job, by default to any."""
        label = f"{names.JOB}={job}" if job else names.JOB
        path = f"{KINDS[kind]}/namespaces/{self.namespace}/{kind}?labelSelector={label}"
        items: list[dict[str, Any]] = (await self.request("GET", path))["items"]
        return items

    @asynccontextmanager
    async def volume(self, folder: Path) -> AsyncIterator[str]:
        """Make a PersistentVolumeClaim of a folder of this machine, the only node; yield its name."""
        name = f"edl-test-{secrets.token_hex(3)}"
        size = {"storage": "1Gi"}
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadWriteMany"],
                "storageClassName": name,
                "hostPath": {"path": str(folder)},
                "persistentVolumeReclaimPolicy": "Retain",
            },
        }
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
            "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": name, "resources": {"requests": size}},
        }
        claims = f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims"
        await self.request("POST", "/api/v1/persistentvolumes", volume)
        await self.request("POST", claims, claim)
        try:
            yield name
        finally:
            await self.request("DELETE", f"{claims}/{name}")
            await self.request("DELETE", f"/api/v1/persistentvolumes/{name}")

    async def request(self, method: str, path: str, body: Any = None, *, content: str = "application/json") -> Any:
        """Send a request to the API server. Raises RuntimeError for a status of 300 or more but 404."""
        import json

        async with self.connect() as client:
            response = await client.call_api(
                path,
                method,
                body=body,
                header_params={"Content-Type": content, "Accept": "application/json"},
                auth_settings=["BearerToken"],
                _preload_content=False,
            )
            async with response:
                answer = json.loads(await response.read())
        if response.status >= 300 and response.status != 404:
            raise RuntimeError(answer)
        return answer


@contextmanager
def own_namespace(kubeconfig: str, image: str, labels: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """Make a namespace, and remove it with all that is in it.

    Jobs first: a terminating namespace deletes pods before Jobs, and a Job that would replace a pod before it removes
    its finalizer can't do so there. Both would remain for ever.
    """
    cluster = Cluster(kubeconfig, image)
    metadata = {"name": cluster.namespace, "labels": dict(labels or {})}
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    asyncio.run(cluster.request("POST", "/api/v1/namespaces", made))
    try:
        yield cluster
    finally:
        jobs = f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs?propagationPolicy=Background"
        asyncio.run(cluster.request("DELETE", jobs))
        asyncio.run(cluster.request("DELETE", f"/api/v1/namespaces/{cluster.namespace}"))


def unavailable_reason(kubeconfig: str) -> str:
    """Return why there is no cluster for tests, empty if there is one."""
    if not kubeconfig:
        return "no Kubernetes here: KUBECONFIG names none (a kind or k3d cluster will do)"
    if not Path(kubeconfig).exists():
        return f"no Kubernetes here: KUBECONFIG names {kubeconfig}, which is not there"
    if not os.environ.get(IMAGE):
        return f"{IMAGE} names no image of the runtime that the cluster has; see deploy/Dockerfile"
    return ""


class PodService:
    """A server in a pod, behind a Service of its name in a cluster's namespace. `host`: its cluster IP."""

    name: str
    port: int

    def __init__(self, cluster: Cluster, **container: Any) -> None:
        self.host = ""
        self._cluster = cluster
        self._container = {
            **container,
            "readinessProbe": {"tcpSocket": {"port": self.port}, "periodSeconds": 1},
            "resources": {"requests": {"cpu": "100m"}},
        }
        space = f"/namespaces/{cluster.namespace}"
        self._deployments = f"/apis/apps/v1{space}/deployments"
        self._services = f"/api/v1{space}/services"

    @property
    def address_in_cluster(self) -> str:
        """HOST:PORT of its Service, for pods."""
        return f"{self.name}.{self._cluster.namespace}.svc:{self.port}"

    def __enter__(self) -> Self:
        asyncio.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run(self._stop())

    async def _start(self) -> None:
        labels = {"app": self.name}
        about = {"metadata": {"name": self.name}}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": self.name, **self._container}]}}
        deployment = {**about, "spec": {"selector": {"matchLabels": labels}, "template": template}}
        await self._cluster.request(
            "POST", self._deployments, {"apiVersion": "apps/v1", "kind": "Deployment", **deployment}
        )
        service = {**about, "spec": {"selector": labels, "ports": [{"port": self.port}]}}
        made = await self._cluster.request("POST", self._services, {"apiVersion": "v1", "kind": "Service", **service})
        self.host = made["spec"]["clusterIP"]
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            while not await asyncio.to_thread(self._answers):  # noqa: ASYNC110 -- another machine makes it so
                await asyncio.sleep(0.2)

    async def _stop(self) -> None:
        for path in (self._deployments, self._services):
            await self._cluster.request("DELETE", f"{path}/{self.name}")

    def _answers(self) -> bool:
        raise NotImplementedError


class RedisService(PodService):
    """A Redis with a password."""

    name = "edl-redis"
    port = 6379

    def __init__(self, cluster: Cluster, password: str) -> None:
        args = ["redis-server", "--requirepass", password, "--save", "", "--protected-mode", "no"]
        super().__init__(cluster, image=REDIS_IMAGE, args=args)
        self.password = password

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{self.host}:{self.port}/0"

    @property
    def url_in_cluster(self) -> str:
        return f"redis://:{self.password}@{self.address_in_cluster}/0"

    def _answers(self) -> bool:
        from redis import Redis
        from redis.exceptions import RedisError

        with Redis.from_url(self.url, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
            try:
                return bool(client.ping())
            except RedisError:
                return False
