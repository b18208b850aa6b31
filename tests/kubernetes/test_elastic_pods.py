"""Elastic training in pods: real Paddle, and a Redis behind a Service."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from checkpointing import steps_of
from contract.asking import ended, eventually
from elastic_agents import batches_of, join, open_gate, stepped, trainers, weights
from kubernetes_cluster import PADDLE_IMAGE, Cluster, RedisService

from edl_runtime.backends.kubernetes import KubernetesBackend
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.elastic import events
from edl_runtime.elastic.events import Event
from edl_runtime.elastic.messages import Finished, Ready
from edl_runtime.pods import Pod, Volume
from edl_runtime.specs import Bounds, Checkpoint, JobSpec
from edl_runtime.store.client import connect

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.timeout(600)]

TESTS = Path(__file__).resolve().parents[1]
EPOCHS = 12
ONCE = batches_of(150, 64, EPOCHS)
EARLY, LATE = 16, 28
"""Gates: of 36 steps."""

WITHIN_S = 150.0


@pytest.fixture
async def backend(cluster: Cluster, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    """Of pods that see the test's folder, and its scripts."""
    if not os.environ.get(PADDLE_IMAGE):
        pytest.skip(f"{PADDLE_IMAGE} names no image with Paddle that the cluster has; see deploy/Dockerfile")
    made = cluster.backend(tmp_path)
    yield made
    for status in await made.list():
        await made.delete(status.name)


@pytest.fixture
async def claim(cluster: Cluster, tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """A PersistentVolumeClaim on a volume made by hand, and its folder on this machine, where the only node is."""
    folder = tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o777)
    async with cluster.volume(folder) as name:
        yield name, folder


def training(tmp_path: Path, claim: str) -> JobSpec:
    """Return a job of one to three instances, of which each takes part in each step."""
    script = [str(TESTS / "elastic_script.py"), str(tmp_path)]
    options = {"epochs": EPOCHS, "step_s": 0.03, "gates": [EARLY, LATE]}
    return JobSpec(
        name="elastic",
        kind="trainer",
        elastic=True,
        command=("python", "-P", "-m", "edl_runtime.cli", "agent", "--instances", "1:3", "--", "python", *script),
        bounds=Bounds(1, 3),
        instances=1,
        env={
            "SCRIPT_OPTIONS": json.dumps(options),
            "EDL_NAMESPACE": "pods",
            "EDL_CHECKPOINT": "/checkpoints/elastic",
            "EDL_CHECKPOINT_EVERY_STEPS": "10",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        },
        grace_s=30.0,
        pod=Pod(
            image=os.environ[PADDLE_IMAGE],
            volumes=[
                Volume(path="/checkpoints", claim=claim),
                Volume(path=str(TESTS), source={"hostPath": {"path": str(TESTS)}}, read_only=True),
            ],
        ),
    )


async def test_a_job_grows_and_shrinks_while_it_trains(
    backend: KubernetesBackend,
    redis_service: RedisService,
    claim: tuple[str, Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """One pod, three, two: each sample exactly once, the weights of one undisturbed trainer, checkpoints on a claim."""
    name, folder = claim
    async with connect(redis_service.url) as client:

        async def told() -> list[Event]:
            return await events.read(client, "pods", "elastic")

        async def happened(kind: str, instances: int) -> bool:
            """Whether this happened to so many instances, or to a generation of so many."""
            sizes = {each.generation: len(each.members) for each in await told() if each.kind == "forming"}
            found = [each for each in await told() if each.kind == kind]
            of_generations = [each for each in found if sizes.get(each.generation) == instances]
            return bool(of_generations) if kind == "resumed" else len({each.instance for each in found}) == instances

        secrets = {"EDL_REDIS_URL": redis_service.url_inside}
        await backend.submit(training(tmp_path, name), token="mine", secrets=secrets)
        await eventually(lambda: happened("resumed", 1), "one that trains", WITHIN_S)
        await backend.resize("elastic", 3)
        await eventually(lambda: happened("ready", 3), "two more that can join", WITHIN_S)
        open_gate(tmp_path, EARLY)
        await eventually(lambda: happened("resumed", 3), "three that train", WITHIN_S)
        await backend.resize("elastic", 2)
        await eventually(lambda: happened("leaving", 1), "one that was told to go", WITHIN_S)
        open_gate(tmp_path, LATE)
        status = await ended(backend, "elastic", WITHIN_S)
        assert (status.phase, status.reason) == ("succeeded", "")
        assert await happened("resumed", 2)
        pauses = [round(each.pause_s, 2) for each in await told() if each.kind == "resumed" and each.pause_s]
    record_property("seconds without a step, after growing and after shrinking", pauses)
    assert len(pauses) == 2
    assert stepped(tmp_path) == ONCE
    assert steps_of(CheckpointStore(Checkpoint(url=str(folder / "elastic"))))[0] == len(ONCE)

    (tmp_path / "alone").mkdir()
    with trainers(tmp_path / "alone", 1, epochs=EPOCHS) as (only,):
        only.await_word(Ready)
        join([only], 1)
        assert only.await_word(Finished).why == "done"
        assert only.wait() == 0
    undisturbed = weights(tmp_path / "alone")
    for name, value in weights(tmp_path).items():
        np.testing.assert_allclose(value, undisturbed[name], rtol=1e-4, atol=1e-5)
