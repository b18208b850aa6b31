"""The training that `resize.py` measures in pods: one elastic job of the cluster that KUBECONFIG names.

The images and Redis are those of the tests; pods see this machine's folders, as it is the only node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _elastic_jobs import ENVIRON, HERE, NAME, Group, Job, Load

from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.kubernetes import names
from edl_runtime.elastic.agent.entrypoint import elastic_job
from edl_runtime.elastic.comm.agent_protocol import Gear
from edl_runtime.pods import Pod, Volume
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, JobSpec

sys.path.insert(0, str(HERE.parent / "tests"))
from support.cluster.cluster import PADDLE_IMAGE, Cluster, RedisService, own_namespace

BOUNDS = Bounds(1, 3)
ENDS_WITHIN_S = 60.0
POLL_EVERY_S = 1.0


def missing_requirement(kubeconfig: str) -> str:
    """Return what is missing for a measurement on that cluster, empty if nothing."""
    from support.cluster.cluster import unavailable_reason

    if why := unavailable_reason(kubeconfig):
        return why
    if not os.environ.get(PADDLE_IMAGE):
        return f"{PADDLE_IMAGE} names no image with Paddle that the cluster has; see deploy/Dockerfile"
    return ""


class PodsJob(Job):
    """An Indexed Job. The highest index is removed first, and the cluster restarts killed instances."""

    removes_highest = True
    restarts_killed = True

    def __init__(self, folder: Path, cluster: Cluster, redis: RedisService, gear: Gear, load: Load) -> None:
        self.folder = folder
        self._cluster = cluster
        self._redis = redis
        self._backend = cluster.backend(folder)
        settings = RuntimeSettings(namespace=folder.name, job=NAME, checkpoint=str(folder / "checkpoints"))
        script = JobSpec(
            name=NAME,
            kind="trainer",
            command=("python", str(HERE / "_elastic_ours.py"), *load.arguments(folder)),
            bounds=Bounds(1, 1),
            instances=1,
            env={**settings.to_env(), **ENVIRON},
            pod=Pod(
                image=os.environ[PADDLE_IMAGE],
                volumes=[Volume(path=str(HERE), source={"hostPath": {"path": str(HERE)}}, read_only=True)],
            ),
        )
        self._spec = elastic_job(script, BOUNDS, gear=gear)
        self.group: Group = Group(redis.url, settings.namespace, gear)
        self._submitted = False
        self._status: tuple[float, JobStatus] | None = None

    def start(self, instance: int) -> None:
        """Add an instance, which gets the number."""
        if self._submitted:
            asyncio.run(self._backend.resize(NAME, instance + 1))
            return
        asyncio.run(
            self._backend.submit(self._spec, token="mine", secrets={"EDL_REDIS_URL": self._redis.url_in_cluster})
        )
        self._submitted = True

    def terminate(self, instance: int) -> None:
        """Remove the instance with that number, the highest."""
        asyncio.run(self._backend.resize(NAME, instance))

    def kill(self, instance: int) -> None:
        """Kill all processes of its pod but the first, which then ends."""
        self._in_pod(instance, "kill -KILL -1")

    def signal_trainer(self, instance: int, pid: int, number: int) -> None:
        self._in_pod(instance, f"kill -{number} {pid}")

    def wait_for_end(self, instance: int) -> None:
        """Wait until its pod is deleted."""
        until = time.monotonic() + ENDS_WITHIN_S
        while any(one.index == instance for one in asyncio.run(self._backend.get(NAME)).instances):
            if time.monotonic() > until:
                raise SystemExit(f"the pod of instance {instance} has not ended within {ENDS_WITHIN_S:.0f} s")
            time.sleep(POLL_EVERY_S)

    def running(self) -> bool:
        now = time.monotonic()
        if self._status is None or now - self._status[0] > POLL_EVERY_S:
            self._status = now, asyncio.run(self._backend.get(NAME))
        return not self._status[1].has_ended

    def close(self) -> None:
        """Save the logs of the job's pods, and delete it."""
        self.group.close()
        with contextlib.suppress(UnknownJobError):
            (self.folder / "pods.log").write_text(asyncio.run(self._log()))
            asyncio.run(self._backend.delete(NAME))

    async def _log(self) -> str:
        return "".join([f"[{line.instance}] {line.text}\n" async for line in self._backend.logs(NAME)])

    def _in_pod(self, instance: int, command: str) -> None:
        asyncio.run(self._execute(instance, command))

    async def _execute(self, instance: int, command: str) -> None:
        """Run a shell command in the pod of an instance."""
        from kubernetes_asyncio.client import CoreV1Api
        from kubernetes_asyncio.stream import WsApiClient

        path = f"/api/v1/namespaces/{self._cluster.namespace}/pods?labelSelector={names.JOB}={NAME}"
        pods: list[dict[str, Any]] = (await self._cluster.request("GET", path))["items"]
        (pod,) = [
            one["metadata"]["name"]
            for one in pods
            if one["metadata"]["annotations"][names.INDEX] == str(instance) and one["status"]["phase"] == "Running"
        ]
        async with self._cluster.connect() as client, WsApiClient(client.configuration) as ws:
            await CoreV1Api(ws).connect_get_namespaced_pod_exec(
                pod,
                self._cluster.namespace,
                container=names.CONTAINER,
                command=["sh", "-c", command],
                stderr=True,
                stdin=False,
                stdout=True,
                tty=False,
            )


@contextlib.contextmanager
def home(kubeconfig: str) -> Iterator[tuple[Cluster, RedisService]]:
    """Make a namespace with a Redis in a pod."""
    with (
        own_namespace(kubeconfig, os.environ[PADDLE_IMAGE]) as cluster,
        RedisService(cluster, secrets.token_hex(8)) as redis,
    ):
        yield cluster, redis


@contextlib.contextmanager
def pods_job(cluster: Cluster, redis: RedisService, gear: Gear, folder: Path, load: Load) -> Iterator[Job]:
    """Open a job of this project without instances, in pods."""
    with contextlib.closing(PodsJob(folder, cluster, redis, gear, load)) as job:
        yield job
