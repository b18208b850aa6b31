"""The loop of a namespace's TrainingJobs, beside an API server in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from edl_runtime.backends.errors import SubmitError, UnknownJobError
from edl_runtime.backends.interface import InstanceStatus, JobStatus, Scaling
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.backends.kubernetes.client import KubernetesClient, Manifest
from edl_runtime.controller import controller
from edl_runtime.controller.controller import JobDefaults, NamespaceController
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, JobSpec


class Namespace:
    """Its API server and its backend.

    `refuses`: why no job can be submitted; empty if it can. `resizes`: sizes that a pass gives jobs as soon as their
    first ones are recorded.
    """

    namespace = "edl"

    def __init__(self, *, refuses: str = "") -> None:
        self.refuses = refuses
        self.submits = 0
        self.reads: Counter[str] = Counter()
        self.jobs: dict[str, JobStatus] = {}
        self.resizes: dict[str, int] = {}
        self.released: list[str] = []
        self.objects: dict[str, Manifest] = {}
        self.changed = asyncio.Condition()
        self.changes = 0

    async def add(self, name: str) -> None:
        metadata = {"name": name, "namespace": "edl", "uid": name, "resourceVersion": "0", "generation": 1}
        spec = {"image": "train:1", "trainer": {"entrypoint": "python train.py", "min-instance": 1, "max-instance": 4}}
        made = {"apiVersion": "paddlepaddle.org/v1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}
        await self._save(name, made)

    async def until(self, name: str, field: str, value: object) -> None:
        """Wait until the status of the object has that."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.objects[name].get("status", {}).get(field) == value)

    async def watch(self, kind: str) -> AsyncIterator[dict[str, Manifest]]:
        assert kind == "TrainingJob"
        seen = -1
        while True:
            async with self.changed:
                await self.changed.wait_for(lambda: self.changes > seen)  # noqa: B023 - awaited at once
                seen = self.changes
            yield dict(self.objects)

    async def is_terminating(self) -> bool:
        return False

    async def wait_for_change(self, since: int) -> int:
        async with self.changed:
            await self.changed.wait_for(lambda: self.changes > since)
            return self.changes

    async def patch(self, manifest: Manifest, change: dict[str, Any]) -> Manifest:
        found = self.objects[manifest["metadata"]["name"]]
        metadata = {**found["metadata"], **change.get("metadata", {})}
        trainer = {**found["spec"]["trainer"], **change.get("spec", {}).get("trainer", {})}
        spec = {**found["spec"], "trainer": trainer}
        if spec != found["spec"]:
            metadata["generation"] += 1
            if size := self.resizes.pop(metadata["name"], 0):
                self.jobs[metadata["name"]] = msgspec.structs.replace(self.jobs[metadata["name"]], wanted=size)
        return await self._save(metadata["name"], {**found, "metadata": metadata, "spec": spec})

    async def patch_status(self, manifest: Manifest, status: dict[str, Any]) -> Manifest:
        name = manifest["metadata"]["name"]
        return await self._save(name, {**self.objects[name], "status": status})

    async def create(self, manifest: Manifest) -> Manifest:
        assert manifest["kind"] == "Event"
        return manifest

    async def pods_change(self) -> None:
        async with self.changed:
            self.changes += 1
            self.changed.notify_all()

    async def read_again(self, name: str) -> None:
        """Wait until the controller has read the job once more."""
        reads = self.reads[name]
        async with self.changed:
            await self.changed.wait_for(lambda: self.reads[name] > reads)

    async def get(self, name: str) -> JobStatus:
        async with self.changed:
            self.reads[name] += 1
            self.changed.notify_all()
        if name not in self.jobs:
            raise UnknownJobError(name, [])
        return self.jobs[name]

    async def submit(self, spec: JobSpec, *, token: str, **_: object) -> JobStatus:
        self.submits += 1
        if self.refuses:
            raise SubmitError(spec.name, self.refuses)
        instances = (InstanceStatus(index=0, phase="running", started_at=1.0),)
        about = {"kind": "trainer", "phase": "running", "digest": spec.digest, "created_at": 1.0}
        scaling = Scaling(bounds=Bounds(1, 4), resources={})
        made = JobStatus(name=spec.name, token=token, wanted=1, instances=instances, scaling=scaling, **about)
        self.jobs[spec.name] = made
        return made

    async def release(self, name: str) -> None:
        async with self.changed:
            self.released.append(name)
            self.changed.notify_all()

    async def _save(self, name: str, manifest: Manifest) -> Manifest:
        async with self.changed:
            self.changes += 1
            saved = {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(self.changes)}}
            self.objects[name] = saved
            self.changed.notify_all()
        return saved


@asynccontextmanager
async def running(namespace: Namespace) -> AsyncIterator[NamespaceController]:
    defaults = JobDefaults(settings=RuntimeSettings(), redis_url="redis://:sesame@edl-redis:6379/0")
    made = NamespaceController(cast(KubernetesClient, namespace), cast(KubernetesBackend, namespace), defaults)
    working = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_what_the_cluster_has_refused_is_not_tried_at_each_change_of_others() -> None:
    """A try costs a dozen requests, and a busy namespace changes many times a second."""
    namespace = Namespace(refuses="the quota is used up")
    async with running(namespace):
        await namespace.add("refused")
        refusal = "job 'refused' could not be started: the quota is used up"
        await namespace.until("refused", "reason", refusal)
        namespace.refuses = ""
        for number in range(3):
            await namespace.add(f"other-{number}")
            await namespace.read_again("refused")
            await namespace.until(f"other-{number}", "phase", "running")
        assert namespace.submits == 4
        assert namespace.objects["refused"]["status"]["reason"] == refusal


async def test_a_large_job_is_looked_at_less_often_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look reads all of its instances, which may take a second, and something changes in it all the time."""
    monkeypatch.setattr(controller, "EACH_INSTANCE_S", 0.1)
    namespace = Namespace()
    async with running(namespace), asyncio.timeout(60):  # hangs otherwise
        await namespace.add("large")
        await namespace.until("large", "phase", "running")
        large = namespace.jobs["large"]
        many = tuple(InstanceStatus(index=index, phase="running", started_at=1.0) for index in range(1_000))
        namespace.jobs["large"] = msgspec.structs.replace(large, instances=many)
        await namespace.add("small-0")
        await namespace.until("large", "instances", 1_000)
        reads = namespace.reads["large"]
        for number in range(1, 6):
            await namespace.add(f"small-{number}")
            await namespace.read_again("small-0")
        assert namespace.reads["large"] <= reads + 1


async def test_a_new_training_does_not_wait_for_a_rescaling_pass() -> None:
    """A pass may wait for another one, or for Redis, for minutes."""
    namespace = Namespace()
    async with running(namespace) as running_one, running_one.passing:
        await namespace.add("new")
        async with asyncio.timeout(60):  # hangs otherwise
            await namespace.until("new", "phase", "running")


async def test_a_new_training_keeps_the_size_that_a_pass_gives_it_at_once() -> None:
    """Also between the record of its first size and its first status."""
    namespace = Namespace()
    namespace.resizes["new"] = 3
    async with running(namespace):
        await namespace.add("new")
        async with asyncio.timeout(60):  # hangs otherwise
            await namespace.until("new", "wanted", 3)
    assert namespace.objects["new"]["spec"]["trainer"]["instances"] == 3


async def test_pods_of_a_suspended_training_are_let_go_once_they_have_left() -> None:
    """As of one that `kubectl scale --replicas=0` has suspended: nothing but its own pods changes any more."""
    namespace = Namespace()
    async with running(namespace):
        await namespace.add("suspended")
        await namespace.until("suspended", "phase", "running")
        assert namespace.released == []
        job = namespace.jobs["suspended"]
        namespace.jobs["suspended"] = msgspec.structs.replace(job, wanted=0, instances=())
        await namespace.pods_change()
        async with namespace.changed:
            await namespace.changed.wait_for(lambda: namespace.released)
    assert set(namespace.released) == {"suspended"}
