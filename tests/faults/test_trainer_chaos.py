"""Trainings by real agents and trainers under seeded faults, with a model that counts its samples."""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import redis
from support.elastic.agent_group import Group, running_group
from support.paths import TRAINING_SCRIPTS

from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Checkpoint
from edl_runtime.store import keys

SCRIPT = TRAINING_SCRIPTS / "counting_script.py"
SAMPLES = 19200
INSTANCES = (0, 1, 2)


def hurt(group: Group, fault: str, draw: random.Random) -> None:
    """Do it to the group, all of whose instances train; each of them is back, or on its way, afterwards."""
    victim, other, _ = draw.sample(INSTANCES, 3)
    match fault:
        case "kill a trainer":
            group.trainer(victim).kill()
        case "kill an instance":
            group.kill(victim)
            group.start(victim)
        case "kill a trainer and an instance":
            group.trainer(other).kill()
            group.kill(victim)
            group.start(victim)
        case "let an instance leave":
            group.terminate(victim)
            group.await_exit(victim)
            group.start(victim)
        case "kill the job":
            for instance in draw.sample(INSTANCES, 3):
                group.kill(instance)
            group.start(*INSTANCES)
        case "empty Redis of the ledger":
            with redis.Redis.from_url(group.settings.redis_url) as client:
                assert client.delete(*keys.ledger_keys(group.settings.namespace, group.settings.job))


def faults_of(draw: random.Random, feed: str) -> list[str]:
    """Return some in an order of the seed's own; a whole job's end is always among them, and after another."""
    some = ["kill a trainer", "kill an instance", "kill a trainer and an instance", "let an instance leave"]
    rest = [*draw.sample(some, 2), "kill the job"]
    if feed == "ledger":
        rest.append("empty Redis of the ledger")
    draw.shuffle(rest)
    return [draw.choice(some[:2]), *rest]


def lost_and_doubled(counts: Array) -> tuple[list[int], list[int]]:
    """Return the samples that are not in the model, and those that are in it more than once; none is there in part."""
    often = np.rint(counts).astype(int)
    assert np.abs(counts - often).max() < 0.01
    return np.flatnonzero(often < 1).tolist(), np.flatnonzero(often > 1).tolist()


def test_a_lost_a_doubled_and_a_part_of_a_sample_are_noticed() -> None:
    """The check of the trainings below can fail."""
    counts = np.ones(4, np.float32)
    assert lost_and_doubled(counts) == ([], [])
    counts[1:3] = 0.0, 2.0
    assert lost_and_doubled(counts) == ([1], [2])
    counts[3] = 0.5
    with pytest.raises(AssertionError):
        lost_and_doubled(counts)


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "feed"), [(0, "cursor"), (1, "ledger"), (2, "cursor"), (3, "ledger"), (4, "ledger")])
def test_trainers_under_fire_miss_nothing_and_double_nothing(
    tmp_path: Path, redis_url: str, namespace: str, seed: int, feed: str
) -> None:
    """The model in the last checkpoint has each sample once, and no step has one twice: their sum is right, too."""
    draw = random.Random(seed)
    kept, out = tmp_path / "kept", tmp_path / "out"
    settings = RuntimeSettings(
        redis_url=redis_url,
        namespace=namespace,
        job="counting",
        checkpoint=str(kept),
        checkpoint_every_steps=10,
        lease_ttl_s=30.0,
    )
    command = [str(SCRIPT), str(out), str(SAMPLES), feed]
    with running_group(out, settings, instances="1:3", command=command) as group:
        (out / "slowly").touch()
        group.start(*INSTANCES)
        formed = group.await_generation(*INSTANCES)
        group.await_event("saved")
        for fault in faults_of(draw, feed):
            group.await_steps(draw.randint(1, 12))
            time.sleep(draw.uniform(0, 0.1))  # so that it comes anywhere in a step
            hurt(group, fault, draw)
            formed = group.await_generation(*INSTANCES, after=formed.generation)
        (out / "slowly").unlink()
        assert set(group.statuses().values()) == {0}, group.history()
        assert "checkpoint.loaded" in group.logs()
    found = CheckpointStore(Checkpoint(url=str(kept))).load_newest()
    assert found is not None
    snapshot = found.snapshot
    assert lost_and_doubled(snapshot.arrays["model"]["counts"]) == ([], [])
    assert msgspec.convert(snapshot.extra["samples"], int) == SAMPLES
