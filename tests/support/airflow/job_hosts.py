"""Hosts of the jobs of a running Airflow: this machine or a cluster, and which jobs they have."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import psutil
from laptop.launcher import Laptop
from support.airflow.processes import is_alive
from support.cluster.cluster import Cluster, RedisService

from edl_runtime.backends.interface import Backend
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.registry.directory import Directory
from edl_runtime.store.redis_client import connect


class JobHost(Protocol):
    """Where students run. `prefixes` are of names of jobs and pools."""

    def is_running(self, student: str) -> bool:
        """Whether the student runs."""
        ...

    def remaining(self, prefixes: tuple[str, ...]) -> list[str]:
        """Return the jobs, pools, processes and objects that exist."""
        ...

    def tokens(self, prefixes: tuple[str, ...]) -> set[str]:
        """Return the tokens (OWNER/TRY) of jobs and pools."""
        ...

    def created_pods(self, prefixes: tuple[str, ...]) -> dict[str, int]:
        """Return how many pods have ever been created, by the kind of their owner: a Job's are students."""
        ...


class LocalHost:
    """Where students are processes."""

    def __init__(self, laptop: Laptop) -> None:
        self._laptop = laptop

    def is_running(self, student: str) -> bool:
        return is_alive(int(student))

    def remaining(self, prefixes: tuple[str, ...]) -> list[str]:
        async def registered_names() -> list[str]:
            jobs = [job.name for job in await LocalBackend(self._laptop.work_dir).list()]
            return [*await _registered(self._laptop.redis.url), *jobs]

        ours = [name for name in asyncio.run(registered_names()) if name.startswith(prefixes)]
        return [*ours, *filter(None, (_command(process, prefixes) for process in psutil.process_iter()))]

    def tokens(self, prefixes: tuple[str, ...]) -> set[str]:
        return _tokens(LocalBackend(self._laptop.work_dir), prefixes)

    def created_pods(self, prefixes: tuple[str, ...]) -> dict[str, int]:  # noqa: ARG002 -- processes are not counted
        return {}


class PodHost:
    """Where students are pods of a cluster, with their uid in the variable STUDENT."""

    def __init__(self, cluster: Cluster, redis: RedisService) -> None:
        self.cluster = cluster
        self.redis = redis

    def is_running(self, student: str) -> bool:
        pods = self._list(f"/pods?labelSelector={names.KIND}=trainer")
        phases = {pod["metadata"]["uid"]: pod["status"]["phase"] for pod in pods}
        return phases.get(student, "Failed") not in ("Succeeded", "Failed")

    def remaining(self, prefixes: tuple[str, ...]) -> list[str]:
        objects = [each for each in asyncio.run(self.cluster.objects()) if each.partition(" ")[2].startswith(prefixes)]
        return [*objects, *(pool for pool in asyncio.run(_registered(self.redis.url)) if pool.startswith(prefixes))]

    def tokens(self, prefixes: tuple[str, ...]) -> set[str]:
        return _tokens(self.cluster.backend(), prefixes)

    def created_pods(self, prefixes: tuple[str, ...]) -> dict[str, int]:
        events = self._list("/events?fieldSelector=reason%3DSuccessfulCreate")
        made_by = [event["involvedObject"] for event in events if event["message"].startswith("Created pod")]
        return Counter(owner["kind"] for owner in made_by if owner["name"].startswith(prefixes))

    def _list(self, path: str) -> list[dict[str, Any]]:
        found: dict[str, Any] = asyncio.run(
            self.cluster.request("GET", f"/api/v1/namespaces/{self.cluster.namespace}{path}")
        )
        return found["items"]


def _tokens(backend: Backend, prefixes: tuple[str, ...]) -> set[str]:
    return {job.token for job in asyncio.run(backend.list()) if job.name.startswith(prefixes)}


async def _registered(redis_url: str) -> list[str]:
    """Return the pools that have members."""
    async with connect(redis_url) as redis:
        return await Directory(redis, "default").pools()


def _command(process: psutil.Process, prefixes: tuple[str, ...]) -> str:
    """Return the command of a process of a job with one of the prefixes, empty for any other."""
    try:
        command = process.cmdline()
        names = [process.environ().get("EDL_JOB", ""), *(Path(word).name for word in command)]
    except psutil.Error:
        return ""
    return " ".join(command) if any(name.startswith(prefixes) for name in names) and process.is_running() else ""
