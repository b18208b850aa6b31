"""Jobs and pools in queues of a real Kueue, which `make kueue` builds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from support.backends.jobs import WAITS, ended, job, reach
from support.cluster import kueue
from support.cluster.cluster import Cluster, own_namespace
from support.cluster.manifests import manifests
from support.cluster.pod_faults import limited_by_role, priority_class, without_leftovers
from support.cluster.recorder import Recorder, of_kueue, only, verbs_of

from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.errors import BackendError
from edl_runtime.pods import Pod
from edl_runtime.specs import Bounds, JobSpec

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

NO_QUOTA = "couldn't assign flavors to pod set main: insufficient unused quota for cpu"


@pytest.fixture(scope="module")
def queued(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A namespace with a Kueue of its own."""
    if why := asyncio.run(kueue.unavailable_reason(cluster)):
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("kueue")
    with own_namespace(cluster.kubeconfig, cluster.image) as made, kueue.running_kueue(made, folder):
        yield made


@pytest.fixture
async def backend(queued: Cluster, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    """A backend whose pods see the test's `tmp_path`; afterwards no object of its jobs remains."""
    made = queued.backend(tmp_path, resources=kueue.POD)
    async with without_leftovers(made, queued):
        yield made


def trainers(name: str, queue: str, instances: int, code: str = WAITS, **more: Any) -> JobSpec:
    """Return a job of elastic trainers of which there may be six."""
    made = job(code, name=name, kind="trainer", instances=instances, elastic=True)
    return msgspec.structs.replace(made, bounds=Bounds(1, 6), pod=Pod(queue=queue, **more))


def waits_for_end(folder: Path) -> str:
    """Return a program that ends well when the folder has a file "end"."""
    end = f"pathlib.Path({str(folder / 'end')!r})"
    return f"import pathlib, time\nprint('up')\nwhile not {end}.exists(): time.sleep(0.1)"


async def runs(backend: KubernetesBackend, name: str, instances: int) -> JobStatus:
    """Return the job's status once so many instances run, and no others are there."""

    def all_run(status: JobStatus) -> bool:
        return [one.phase for one in status.instances] == ["running"] * instances

    return await reach(backend, name, all_run)


async def uids(cluster: Cluster, name: str) -> dict[str, str]:
    """Return the uid of each of the job's pods, by its index."""
    key = "batch.kubernetes.io/job-completion-index"
    pods = await cluster.list_objects("pods", name)
    return {pod["metadata"]["annotations"][key]: pod["metadata"]["uid"] for pod in pods}


async def test_a_job_starts_when_its_queue_has_quota_for_it(
    backend: KubernetesBackend, queued: Cluster, requests: list[str], tmp_path: Path
) -> None:
    """Until then it says why it waits; who watches reads Kueue's Workloads once and then hears of changes."""
    await kueue.make_queue(queued, "start", pods=2)
    limited = await limited_by_role(queued, tmp_path)
    recorder = Recorder(limited.connect, queued)
    limited.connect = recorder.open
    backend = limited.backend(resources=kueue.POD)
    await backend.submit(trainers("first", "start", 2), token="mine", secrets={})
    await runs(backend, "first", 2)
    submitted = await backend.submit(trainers("second", "start", 1), token="mine", secrets={})
    assert (submitted.phase, submitted.wanted) == ("pending", 1)
    waits = f"suspended: it waits in Kueue's queue 'start': {NO_QUOTA}"
    await reach(backend, "second", lambda status: status.reason.startswith(waits))
    await backend.submit(trainers("lost", "nowhere", 1), token="mine", secrets={})
    nowhere = "suspended: it waits in Kueue's queue 'nowhere': LocalQueue nowhere doesn't exist"
    await reach(backend, "lost", lambda status: status.reason == nowhere)
    async with backend.following() as watching:
        await reach(watching, "second", lambda status: status.reason.startswith(waits))
        requests.clear()
        assert await watching.delete("first")
        assert (await runs(watching, "second", 1)).reason == ""
        assert not [one for one in requests if one.endswith("/workloads")]
    granted = verbs_of(only("Role", manifests("role.yaml", queued.namespace)))
    assert of_kueue(recorder.used) == of_kueue(granted)


async def test_a_job_grows_as_far_as_its_queue_has_quota_and_no_trainer_is_stopped(
    backend: KubernetesBackend, queued: Cluster
) -> None:
    """Beyond, new pods wait, and nothing grows further; they start when another job of the queue has ended."""
    await kueue.make_queue(queued, "grow", pods=4)
    await backend.submit(trainers("other", "grow", 1), token="mine", secrets={})
    await backend.submit(trainers("job", "grow", 2), token="mine", secrets={})
    await runs(backend, "other", 1)
    assert (await runs(backend, "job", 2)).scaling.queue_resizes
    first = await uids(queued, "job")

    await backend.resize("job", 3)
    await runs(backend, "job", 3)
    third = await uids(queued, "job")
    assert first.items() <= third.items()

    await backend.resize("job", 4)
    with pytest.raises(BackendError, match="Kueue's queue 'grow' has yet to admit 1 pod of 'job'"):
        await backend.resize("job", 5)
    waits = f"3 of 4 run; 1 waits in Kueue's queue 'grow': {NO_QUOTA}"
    await reach(backend, "job", lambda status: status.reason.startswith(waits))
    assert third.items() <= (await uids(queued, "job")).items()

    assert await backend.delete("other")
    status = await runs(backend, "job", 4)
    assert (status.phase, status.reason, [one.restarts for one in status.instances]) == ("running", "", [0] * 4)
    fourth = await uids(queued, "job")
    assert third.items() <= fourth.items()

    await backend.resize("job", 2)
    await runs(backend, "job", 2)
    assert first == {index: uid for index, uid in (await uids(queued, "job")).items() if index in first}
    await backend.submit(trainers("other", "grow", 2), token="mine", secrets={})
    await runs(backend, "other", 2)  # the queue has its quota back
    assert first.items() <= (await uids(queued, "job")).items()


async def test_a_growth_that_waits_can_be_taken_back(backend: KubernetesBackend, queued: Cluster) -> None:
    """The trainers that run are not stopped, and the job can grow later."""
    await kueue.make_queue(queued, "back", pods=2)
    await backend.submit(trainers("job", "back", 2), token="mine", secrets={})
    await runs(backend, "job", 2)
    first = await uids(queued, "job")
    await backend.resize("job", 4)
    await reach(backend, "job", lambda status: status.reason.startswith("2 of 4 run; 2 wait in Kueue's queue 'back': "))
    await backend.resize("job", 2)
    await runs(backend, "job", 2)
    await kueue.set_quota(queued, "back", pods=3)
    await backend.resize("job", 3)
    await runs(backend, "job", 3)
    assert first.items() <= (await uids(queued, "job")).items()


async def test_a_job_ends_though_its_growth_waits(backend: KubernetesBackend, queued: Cluster, tmp_path: Path) -> None:
    """What its trainers leave is quota for the one that waits, which then finds nothing to do."""
    await kueue.make_queue(queued, "end", pods=2)
    await backend.submit(trainers("job", "end", 2, waits_for_end(tmp_path)), token="mine", secrets={})
    await runs(backend, "job", 2)
    await backend.resize("job", 3)
    await reach(backend, "job", lambda status: status.reason.startswith("2 of 3 run; 1 waits in Kueue's queue 'end': "))
    (tmp_path / "end").touch()
    assert (await ended(backend)).phase == "succeeded"


async def test_a_preempted_job_says_for_whom_it_waits(backend: KubernetesBackend, queued: Cluster) -> None:
    """Kueue suspends it for one of a higher priority, and starts it again afterwards."""
    await kueue.make_queue(queued, "rank", pods=2)
    async with priority_class(queued, 1000) as high:
        await backend.submit(trainers("low", "rank", 2), token="mine", secrets={})
        await runs(backend, "low", 2)
        await backend.submit(trainers("high", "rank", 2, priority_class=high), token="mine", secrets={})
        why = "suspended: it waits in Kueue's queue 'rank': Preempted to accommodate a workload"
        preempted = await reach(backend, "low", lambda status: status.reason.startswith(why))
        assert (preempted.phase, preempted.wanted, preempted.is_suspended) == ("pending", 2, False)
        await runs(backend, "high", 2)
        assert await backend.delete("high")
        assert (await runs(backend, "low", 2)).reason == ""


async def test_a_pool_s_pods_are_admitted_one_by_one(backend: KubernetesBackend, queued: Cluster) -> None:
    """Its Deployment has the label, and its pods Kueue's gate until there is quota."""
    await kueue.make_queue(queued, "teach", pods=2)
    teachers = msgspec.structs.replace(job(WAITS, name="teachers"), pod=Pod(queue="teach"))
    await backend.submit(teachers, token="mine", secrets={})
    await runs(backend, "teachers", 1)
    await backend.resize("teachers", 3)
    waits = "2 of 3 run; 1 waits in Kueue's queue 'teach': "
    await reach(backend, "teachers", lambda status: status.reason.startswith(waits) and "insufficient" in status.reason)
    await kueue.set_quota(queued, "teach", pods=3)
    assert (await runs(backend, "teachers", 3)).reason == ""


async def test_rescaling_asks_a_queue_for_one_trainer_at_a_time(
    backend: KubernetesBackend, queued: Cluster, requests: list[str], redis_url: str, namespace: str
) -> None:
    """One that waits starts when the quota is free, without another pass; only then does a pass ask for the next."""
    await kueue.make_queue(queued, "wish", pods=3)
    fixed = msgspec.structs.replace(trainers("fixed", "wish", 1), bounds=Bounds(1, 1))
    await backend.submit(fixed, token="mine", secrets={})
    await backend.submit(trainers("job", "wish", 2), token="mine", secrets={})
    await runs(backend, "fixed", 1)
    await runs(backend, "job", 2)
    first = await uids(queued, "job")

    async def grown() -> dict[str, int]:
        requests.clear()
        done = await rescale(backend, client, namespace, RescalingRules())
        assert done.refused == {}
        patched = [one for one in requests if one.startswith("PATCH")]
        assert len(patched) == len(done.plan.changes)
        return {one.name: one.target for one in done.plan.changes}

    async with Redis.from_url(redis_url) as client:
        assert await grown() == {"job": 3}
        await reach(backend, "job", lambda status: status.reason.startswith("2 of 3 run; 1 waits in Kueue's queue"))
        assert await grown() == {}
        assert await backend.delete("fixed")
        await runs(backend, "job", 3)
        assert await grown() == {"job": 4}
    assert first.items() <= (await uids(queued, "job")).items()


async def test_a_job_that_has_grown_starts_again_where_there_is_quota_for_fewer(
    backend: KubernetesBackend, queued: Cluster, redis_url: str, namespace: str
) -> None:
    """Kueue starts all trainers of a job or none: it asks for its minimum, and then for one more at a time."""
    await kueue.make_queue(queued, "less", pods=3)
    await backend.submit(trainers("low", "less", 2), token="mine", secrets={})
    await runs(backend, "low", 2)
    await backend.resize("low", 3)
    await runs(backend, "low", 3)
    await kueue.set_quota(queued, "less", pods=2)
    async with priority_class(queued, 1000) as high, Redis.from_url(redis_url) as client:
        await backend.submit(trainers("high", "less", 1, priority_class=high), token="mine", secrets={})
        await runs(backend, "high", 1)
        assert await backend.delete("high")
        too_many = "current podset request (60m) > maximum capacity (40m)"
        await reach(backend, "low", lambda status: status.reason.endswith(too_many) and not status.instances)
        for instances in (1, 2):
            assert (await rescale(backend, client, namespace, RescalingRules())).refused == {}
            await runs(backend, "low", instances)
