"""Elastic training in pods: real Paddle, and a Redis behind a Service."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import fsspec  # type: ignore[import-untyped]
import msgspec
import numpy as np
import pytest
from conftest import skip_on_a_laptop
from support.backends.jobs import ended, eventually, reach
from support.checkpoints.snapshots import steps_of
from support.cluster.cluster import Cluster, RedisService
from support.cluster.object_store import BUCKET, S3_IMAGE, ObjectStoreService
from support.elastic.fake_agent import batches_of, generations_of, join, open_gate, stepped, trainers, weights
from support.paths import TESTS, TRAINING_SCRIPTS

from edl_runtime.backends.interface import SUSPENDED
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.elastic.comm.agent_protocol import WorkerFinished
from edl_runtime.elastic.rendezvous import redis_store
from edl_runtime.elastic.rendezvous.redis_store import Event
from edl_runtime.pods import Pod, Volume
from edl_runtime.specs import Bounds, Checkpoint, JobSpec
from edl_runtime.store.redis_client import connect

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.timeout(600)]

EPOCHS = 12
ONCE = batches_of(150, 64, EPOCHS)
EARLY, LATE = 16, 28
"""Gates: of 36 steps."""

WITHIN_S = 150.0
PAUSES = "seconds without a step, after each growth and after shrinking"


@pytest.fixture
async def backend(cluster: Cluster, paddle_image: str, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    """A backend whose pods see the test's folder and scripts."""
    made = cluster.backend(tmp_path, image=paddle_image)
    yield made
    for status in await made.list():
        await made.delete(status.name)


class Storage(NamedTuple):
    """Storage of checkpoints: its URL in pods, the volumes or secrets that pods need, and its URL on this machine."""

    url: str
    pod: Pod
    local_url: str


@pytest.fixture
async def claim(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Storage]:
    """A PersistentVolumeClaim of a folder of this machine, the only node."""
    folder = tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o777)
    async with cluster.volume(folder) as name:
        pod = Pod(volumes=[Volume(path="/checkpoints", claim=name)])
        yield Storage("/checkpoints/elastic", pod, str(folder / "elastic"))


@pytest.fixture
def object_store(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """A bucket of an S3 server in a pod, which requires the key in the Secret."""
    if not os.environ.get(S3_IMAGE):
        skip_on_a_laptop(f"{S3_IMAGE} names no image with an S3 server that the cluster has; see services/Dockerfile")
    with ObjectStoreService(cluster) as service:
        for name, value in service.environ.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/elastic"
        yield Storage(url, Pod(env_from_secrets=[service.secret]), url)


def training(out: Path, storage: Storage, epochs: int, *gates: int) -> JobSpec:
    """Return a job of one to three instances."""
    script = [str(TRAINING_SCRIPTS / "elastic_script.py"), str(out)]
    options = {"epochs": epochs, "step_s": 0.03, "gates": gates}
    pod = Pod(volumes=[Volume(path=str(TESTS), source={"hostPath": {"path": str(TESTS)}}, read_only=True)])
    return JobSpec(
        name="elastic",
        kind="trainer",
        elastic=True,
        command=("python", "-P", "-m", "edl_runtime.cli", "agent", "--instances", "1:3", "--", "python", *script),
        bounds=Bounds(1, 3),
        instances=1,
        env={
            "SCRIPT_OPTIONS": json.dumps(options),
            "EDL_NAMESPACE": out.name,  # or it would read the events of an earlier test
            "EDL_CHECKPOINT": storage.url,
            "EDL_CHECKPOINT_EVERY_STEPS": "10",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        },
        grace_s=30.0,
        pod=pod.over(storage.pod),
    )


async def test_a_job_grows_and_shrinks_with_checkpoints_on_a_claim(
    backend: KubernetesBackend,
    redis_service: RedisService,
    claim: Storage,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """One pod, three, two: each sample exactly once, and the weights of an undisturbed run."""
    record_property(PAUSES, await grow_and_shrink(backend, redis_service, claim, tmp_path))


@pytest.mark.deep
async def test_a_job_grows_and_shrinks_with_checkpoints_on_s3(
    backend: KubernetesBackend,
    redis_service: RedisService,
    object_store: Storage,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """The next run resumes from them; they can't be read without the Secret's key."""
    record_property(PAUSES, await grow_and_shrink(backend, redis_service, object_store, tmp_path))

    await backend.delete("elastic")
    again = tmp_path / "again"
    again.mkdir()
    again.chmod(0o777)
    secrets = {"EDL_REDIS_URL": redis_service.url_in_cluster}
    await backend.submit(training(again, object_store, EPOCHS + 2), token="mine", secrets=secrets)
    status = await ended(backend, "elastic", WITHIN_S)
    assert (status.phase, status.reason) == ("succeeded", ""), "\n".join(status.last_lines)
    longer = batches_of(150, 64, EPOCHS + 2)
    assert stepped(again) == {step: samples for step, samples in longer.items() if step > len(ONCE)}

    unauthorized = fsspec.filesystem(
        "s3", key=os.environ["AWS_ACCESS_KEY_ID"], secret="another", skip_instance_cache=True
    )
    with pytest.raises(PermissionError):
        unauthorized.ls(BUCKET)


@pytest.mark.deep
async def test_a_suspended_training_resumes_from_its_checkpoint(
    backend: KubernetesBackend, redis_service: RedisService, claim: Storage, tmp_path: Path
) -> None:
    """Its pods end together after one of them has written a checkpoint, from which others resume."""
    async with connect(redis_service.url) as client:

        async def instances_with(kind: str) -> set[int | None]:
            found = await redis_store.read_events(client, tmp_path.name, "elastic")
            return {each.instance for each in found if each.kind == kind}

        async def both_are(kind: str) -> bool:
            return await instances_with(kind) == {0, 1}

        async def two_train() -> bool:
            found = await redis_store.read_events(client, tmp_path.name, "elastic")
            return any(each.kind == "resumed" and len(each.members) == 2 for each in found)

        spec = msgspec.structs.replace(training(tmp_path, claim, EPOCHS, EARLY, LATE), instances=2)
        secrets = {"EDL_REDIS_URL": redis_service.url_in_cluster}
        submitted = await backend.submit(spec, token="mine", secrets=secrets)
        assert submitted.scaling is not None
        assert submitted.scaling.resumes
        await eventually(lambda: both_are("ready"), "two that can join", WITHIN_S)
        open_gate(tmp_path, EARLY)
        await eventually(two_train, "two that train", WITHIN_S)
        await backend.resize("elastic", 0)
        await eventually(lambda: both_are("leaving"), "both leaving", WITHIN_S)
        open_gate(tmp_path, LATE)
        status = await reach(backend, "elastic", lambda status: not status.instances, WITHIN_S)
        assert (status.phase, status.is_suspended, status.reason) == ("pending", True, SUSPENDED)
        done = max(stepped(tmp_path))
        assert steps_of(CheckpointStore(Checkpoint(url=claim.local_url)))[0] == done < len(ONCE)

        await backend.resize("elastic", 3)
        status = await ended(backend, "elastic", WITHIN_S)
    assert (status.phase, status.reason) == ("succeeded", ""), "\n".join(status.last_lines)
    assert stepped(tmp_path) == ONCE
    assert [step for step, generations in generations_of(tmp_path).items() if len(generations) > 1] == []


async def grow_and_shrink(
    backend: KubernetesBackend, redis_service: RedisService, storage: Storage, tmp_path: Path
) -> list[float]:
    """Train with one pod, three and two; return the seconds of each pause."""
    async with connect(redis_service.url) as client:

        async def all_events() -> list[Event]:
            return await redis_store.read_events(client, tmp_path.name, "elastic")

        async def happened(kind: str, instances: int) -> bool:
            """Whether there is such an event of a generation of this size, or of this number of instances."""
            sizes = {each.generation: len(each.members) for each in await all_events() if each.kind == "forming"}
            found = [each for each in await all_events() if each.kind == kind]
            of_generations = [each for each in found if sizes.get(each.generation) == instances]
            return bool(of_generations) if kind == "resumed" else len({each.instance for each in found}) == instances

        secrets = {"EDL_REDIS_URL": redis_service.url_in_cluster}
        await backend.submit(training(tmp_path, storage, EPOCHS, EARLY, LATE), token="mine", secrets=secrets)
        await eventually(lambda: happened("resumed", 1), "one that trains", WITHIN_S)
        await backend.resize("elastic", 3)
        await eventually(lambda: happened("ready", 3), "two more that can join", WITHIN_S)
        open_gate(tmp_path, EARLY)
        await eventually(lambda: happened("resumed", 3), "three that train", WITHIN_S)
        await backend.resize("elastic", 2)
        await eventually(lambda: happened("leaving", 1), "one that is leaving", WITHIN_S)
        open_gate(tmp_path, LATE)
        status = await ended(backend, "elastic", WITHIN_S)
        assert (status.phase, status.reason) == ("succeeded", ""), "\n".join(status.last_lines)
        assert await happened("resumed", 2)
        pauses = [round(each.pause_s, 2) for each in await all_events() if each.kind == "resumed" and each.pause_s]
    assert len(pauses) in {2, 3}  # the two new instances may join one after the other
    assert stepped(tmp_path) == ONCE
    assert steps_of(CheckpointStore(Checkpoint(url=storage.local_url)))[0] == len(ONCE)

    (tmp_path / "alone").mkdir()
    with trainers(tmp_path / "alone", 1, epochs=EPOCHS) as (only,):
        join([only], 1)
        assert only.await_message(WorkerFinished).why == "done"
        assert only.wait() == 0
    undisturbed = weights(tmp_path / "alone")
    for name, value in weights(tmp_path).items():
        np.testing.assert_allclose(value, undisturbed[name], rtol=1e-4, atol=1e-5)
    return pauses
