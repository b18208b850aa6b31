"""The loop of a namespace's TrainingJobs, beside an API server in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from edl_runtime.backends.errors import SubmitError, UnknownJobError
from edl_runtime.backends.interface import InstanceStatus, JobStatus, Scaling
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.backends.kubernetes.client import KubernetesClient, Manifest
from edl_runtime.compat.job_specs import job_spec
from edl_runtime.compat.training_job import TrainingJob
from edl_runtime.controller import controller
from edl_runtime.controller.controller import JobDefaults, NamespaceController
from edl_runtime.controller.redis_access import RedisAccess
from edl_runtime.controller.vitals import Vitals
from edl_runtime.elastic.rendezvous.group_status import GroupStatus
from edl_runtime.monitor.reports import UNKNOWN, JobReport
from edl_runtime.progress import Progress
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store.errors import RegistryUnavailableError


class Namespace:
    """Its API server and its backend.

    `refuses`: why no job can be submitted; empty if it can. `raises`: errors of its backend, by the job's name.
    `resizes`: sizes that a pass gives jobs as soon as their first ones are recorded.
    """

    namespace = "edl"

    def __init__(self, *, refuses: str = "") -> None:
        self.refuses = refuses
        self.submits = 0
        self.reads: Counter[str] = Counter()
        self.jobs: dict[str, JobStatus] = {}
        self.resizes: dict[str, int] = {}
        self.released: list[str] = []
        self.raises: dict[str, Exception] = {}
        self.reports: dict[str, JobReport] = {}
        self.redis_away = False
        self.objects: dict[str, Manifest] = {}
        self.changed = asyncio.Condition()
        self.changes = 0

    async def add(self, name: str, *, generation: object = 1, **of_trainer: object) -> None:
        metadata = {"name": name, "namespace": "edl", "uid": name, "resourceVersion": "0", "generation": generation}
        trainer = {"entrypoint": "python train.py", "min-instance": 1, "max-instance": 4, **of_trainer}
        spec = {"image": "train:1", "trainer": trainer}
        made = {"apiVersion": "paddlepaddle.org/v1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}
        await self._save(name, made)

    async def until(self, name: str, field: str, value: object) -> None:
        """Wait until the status of the object has that."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.objects[name].get("status", {}).get(field) == value)

    async def list(self) -> list[JobStatus]:
        return [*self.jobs.values()]

    async def read_reports(self, jobs: Sequence[JobStatus]) -> dict[str, JobReport]:
        if self.redis_away:
            raise RegistryUnavailableError("redis:6379", "refused")
        return {job.name: self.reports[job.name] for job in jobs if job.name in self.reports}

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
        if error := self.raises.get(name):
            raise error
        if name not in self.jobs:
            raise UnknownJobError(name, [])
        return self.jobs[name]

    async def submit(self, spec: JobSpec, *, token: str, secrets: dict[str, str], **_: object) -> JobStatus:
        self.submits += 1
        self.secrets = secrets
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


class Access:
    """A Redis user of the namespace's own."""

    async def grant(self) -> str:
        return "redis://edl-ml:of-this-week@edl-redis:6379/0"


@asynccontextmanager
async def running(namespace: Namespace, access: Access | None = None) -> AsyncIterator[NamespaceController]:
    defaults = JobDefaults(settings=RuntimeSettings(), redis_url="redis://:sesame@edl-redis:6379/0")
    made = NamespaceController(
        cast(KubernetesClient, namespace),
        cast(KubernetesBackend, namespace),
        defaults,
        vitals=Vitals(),
        read_reports=namespace.read_reports,
        access=cast(RedisAccess | None, access),
    )
    working = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


@pytest.mark.parametrize(
    ("access", "url"),
    [(None, "redis://:sesame@edl-redis:6379/0"), (Access(), "redis://edl-ml:of-this-week@edl-redis:6379/0")],
    ids=["one namespace", "all namespaces"],
)
async def test_jobs_get_the_login_of_their_namespace(access: Access | None, url: str) -> None:
    """Where the controller serves all; else its own."""
    namespace = Namespace()
    async with running(namespace, access):
        await namespace.add("job")
        await namespace.until("job", "phase", "running")
    assert namespace.secrets == {"EDL_REDIS_URL": url}


async def test_what_the_cluster_has_refused_is_not_tried_at_each_change_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A try costs a dozen requests, and a busy namespace changes many times a second."""
    monkeypatch.setattr(controller, "RESYNC_S", 3600.0)
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


@pytest.mark.parametrize(
    ("of_trainer", "why"),
    [
        (
            {"resources": {"limits": {"nvidia.com/gpu": "9" * 5000}}},
            "spec.trainer.resources.limits.nvidia.com/gpu: got",
        ),
        ({"resources": {"limits": {"memory": "200Ti"}}}, "spec.trainer.resources.limits.memory: got '200Ti'"),
        ({"max-instance": 10**30}, "spec.trainer.max-instance: got"),
        ({"entrypoint": "python\0"}, "spec.trainer.entrypoint: got"),
    ],
    ids=["digits", "memory", "instances", "null byte"],
)
async def test_what_one_object_asks_for_is_its_invalid_spec(of_trainer: dict[str, object], why: str) -> None:
    """And those of others are served."""
    namespace = Namespace()
    async with running(namespace), asyncio.timeout(60):  # hangs otherwise
        await namespace.add("evil", **of_trainer)
        await namespace.add("good")
        await namespace.until("good", "phase", "running")
        await namespace.until("evil", "phase", "creating")
    accepted = namespace.objects["evil"]["status"]["conditions"][0]
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert accepted["message"].startswith(why)


async def test_an_error_that_nobody_expects_of_a_spec_is_its_invalid_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has made the object is told, with the line of code that can't do with it."""

    def spec_of(job: TrainingJob, *_: object, **more: Any) -> JobSpec:
        if job.name == "evil":
            raise RecursionError("too deep")
        return job_spec(job, *_, **more)

    monkeypatch.setattr(controller, "job_spec", spec_of)
    namespace = Namespace()
    async with running(namespace), asyncio.timeout(60):  # hangs otherwise
        await namespace.add("evil")
        await namespace.add("good")
        await namespace.until("good", "phase", "running")
        await namespace.until("evil", "phase", "creating")
    status = namespace.objects["evil"]["status"]
    assert status["conditions"][0]["reason"] == "InvalidSpec"
    assert status["reason"].startswith("the spec can't be handled: RecursionError: too deep (test_controller.py:")


async def test_whatever_an_object_does_to_the_controller_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no status can tell is logged, and tried again."""
    monkeypatch.setattr(controller, "RETRY_S", 0.0)
    namespace = Namespace()
    namespace.raises["job"] = KeyError("of its Job")
    with capture_logs() as logs:
        async with running(namespace), asyncio.timeout(60):  # hangs otherwise
            await namespace.add("evil", generation="of no number")
            await namespace.add("job")
            await namespace.add("good")
            await namespace.until("good", "phase", "running")
            await namespace.read_again("evil")
            namespace.raises.clear()
            await namespace.until("job", "phase", "running")
    causes = {entry["job"]: entry["cause"] for entry in logs if entry["event"] == "trainingjob.step_failed"}
    assert causes.keys() == {"evil", "job"}
    assert causes["evil"].startswith("TrainingJob 'evil' can't be handled: ValueError: invalid literal for int()")
    assert causes["job"].startswith("TrainingJob 'job' can't be handled: KeyError: 'of its Job'")


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


async def test_the_status_says_how_far_a_training_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its last report: the share of all steps, or the step. Nonsense is that job's alone."""
    monkeypatch.setattr(controller, "PROGRESS_EVERY_S", 0.01)
    monkeypatch.setattr(controller, "RESYNC_S", 0.05)
    namespace = Namespace()
    with capture_logs() as logs:
        async with running(namespace), asyncio.timeout(60):  # hangs otherwise
            namespace.reports = {
                "evil": JobReport(progress=Progress(step=10**400, total_steps=1, updated_at=9.0)),
                "half": JobReport(progress=Progress(step=20, total_steps=40, updated_at=9.0)),
                "open": JobReport(progress=Progress(step=1_200, updated_at=9.0)),
                "silent": JobReport(),
            }
            for name in namespace.reports:
                await namespace.add(name)
            await namespace.until("half", "progress", "50%")
            await namespace.until("open", "progress", "step 1,200")
            await namespace.until("evil", "phase", "running")
            await namespace.until("silent", "phase", "running")
            namespace.reports["half"] = JobReport(progress=Progress(step=30, total_steps=40, updated_at=9.5))
            await namespace.until("half", "progress", "75%")
    assert "progress" not in namespace.objects["evil"]["status"]
    assert "progress" not in namespace.objects["silent"]["status"]
    assert {entry["job"] for entry in logs if entry["event"] == "progress.unreadable"} == {"evil"}


async def test_the_status_says_that_a_training_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while Redis can't be reached, when nothing is known; and no longer once it makes steps again."""
    monkeypatch.setattr(controller, "PROGRESS_EVERY_S", 0.01)
    monkeypatch.setattr(controller, "RESYNC_S", 0.05)
    namespace = Namespace()
    trains = JobReport(
        progress=Progress(step=20, total_steps=40, updated_at=100.0), group=GroupStatus(heard_at=101.0, read_at=101.0)
    )
    assert trains.group is not None
    later = msgspec.structs.replace(trains.group, heard_at=300.0, read_at=300.0, waits="no room")

    def progressing() -> tuple[str, str]:
        (found,) = [one for one in namespace.objects["a"]["status"]["conditions"] if one["type"] == "Progressing"]
        return found["status"], found["reason"]

    async with running(namespace), asyncio.timeout(60):  # hangs otherwise
        namespace.reports["a"] = trains
        await namespace.add("a")
        await namespace.until("a", "progress", "50%")
        assert (progressing(), namespace.objects["a"]["status"]["reason"]) == (("True", "Steps"), "")
        monkeypatch.setattr(controller, "RESYNC_S", 600.0)  # it is written at once
        namespace.reports["a"] = msgspec.structs.replace(trains, group=later)
        await namespace.until("a", "reason", "no step for 3m 20s: no room")
        assert progressing() == ("False", "NoStep")
        namespace.redis_away = True
        await namespace.until("a", "reason", UNKNOWN)
        assert progressing() == ("Unknown", "Unreadable")
        namespace.redis_away = False
        namespace.reports["a"] = trains
        await namespace.until("a", "reason", "")
        assert progressing() == ("True", "Steps")
