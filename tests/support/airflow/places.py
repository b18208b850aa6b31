"""Where the jobs of a running Airflow are: processes of this machine, or pods. What there is, and was, of them."""

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


class Place(Protocol):
    """Where students run."""

    def lives(self, student: str) -> bool:
        """Whether the student still runs."""
        ...

    def left(self, marks: tuple[str, ...]) -> list[str]:
        """Return all that there is of jobs and pools whose names begin so."""
        ...

    def tokens(self, marks: tuple[str, ...]) -> set[str]:
        """Return what jobs and pools whose names begin so carry: OWNER/TRY of who has them now."""
        ...

    def created(self, marks: tuple[str, ...]) -> dict[str, int]:
        """Return how many pods there have ever been, by what has made them: a Job's are students."""
        ...


class ThisMachine:
    """Where students are processes."""

    def __init__(self, laptop: Laptop) -> None:
        self._laptop = laptop

    def lives(self, student: str) -> bool:
        return is_alive(int(student))

    def left(self, marks: tuple[str, ...]) -> list[str]:
        async def known() -> list[str]:
            jobs = [job.name for job in await LocalBackend(self._laptop.work_dir).list()]
            return [*await _registered(self._laptop.redis.url), *jobs]

        ours = [name for name in asyncio.run(known()) if name.startswith(marks)]
        return [*ours, *filter(None, (_command(process, marks) for process in psutil.process_iter()))]

    def tokens(self, marks: tuple[str, ...]) -> set[str]:
        return _tokens(LocalBackend(self._laptop.work_dir), marks)

    def created(self, marks: tuple[str, ...]) -> dict[str, int]:  # noqa: ARG002 -- nobody counts processes
        return {}


class Pods:
    """Where students are pods of a cluster, which know their uids as STUDENT."""

    def __init__(self, cluster: Cluster, redis: RedisService) -> None:
        self.cluster = cluster
        self.redis = redis

    def lives(self, student: str) -> bool:
        pods = self._ask(f"/pods?labelSelector={names.KIND}=trainer")
        phases = {pod["metadata"]["uid"]: pod["status"]["phase"] for pod in pods}
        return phases.get(student, "Failed") not in ("Succeeded", "Failed")

    def left(self, marks: tuple[str, ...]) -> list[str]:
        objects = [one for one in asyncio.run(self.cluster.objects()) if one.partition(" ")[2].startswith(marks)]
        return [*objects, *(pool for pool in asyncio.run(_registered(self.redis.url)) if pool.startswith(marks))]

    def tokens(self, marks: tuple[str, ...]) -> set[str]:
        return _tokens(self.cluster.backend(), marks)

    def created(self, marks: tuple[str, ...]) -> dict[str, int]:
        events = self._ask("/events?fieldSelector=reason%3DSuccessfulCreate")
        made_by = [event["involvedObject"] for event in events if event["message"].startswith("Created pod")]
        return Counter(owner["kind"] for owner in made_by if owner["name"].startswith(marks))

    def _ask(self, path: str) -> list[dict[str, Any]]:
        found: dict[str, Any] = asyncio.run(
            self.cluster.request("GET", f"/api/v1/namespaces/{self.cluster.namespace}{path}")
        )
        return found["items"]


def _tokens(backend: Backend, marks: tuple[str, ...]) -> set[str]:
    return {job.token for job in asyncio.run(backend.list()) if job.name.startswith(marks)}


async def _registered(redis_url: str) -> list[str]:
    """Return the pools that somebody is registered in."""
    async with connect(redis_url) as redis:
        return await Directory(redis, "default").pools()


def _command(process: psutil.Process, marks: tuple[str, ...]) -> str:
    """Return the command of a process that belongs to a job with such a name, empty for any other."""
    try:
        command = process.cmdline()
        names = [process.environ().get("EDL_JOB", ""), *(Path(word).name for word in command)]
    except psutil.Error:
        return ""
    return " ".join(command) if any(name.startswith(marks) for name in names) and process.is_running() else ""
