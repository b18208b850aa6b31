"""A training and a student while Sentinel replaces their Redis: by one that has all writes, or has lost some."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.elastic.agent_group import running_group
from support.elastic.fake_agent import stepped
from support.registry.sentinel import WatchedRedis, watched_redis
from support.students.readers import (
    POOL,
    Batches,
    FaultyTeacher,
    all_answered,
    metadata_of,
    read_epoch,
    read_until,
    reader_of,
    registered,
    running_faulty_teacher,
)
from support.teachers.process import Teacher

from edl_runtime.distill import Discovered
from edl_runtime.settings import RuntimeSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[WatchedRedis]:
    with watched_redis(tmp_path / "redis") as redis:
        yield redis


@pytest.fixture
def settings(watched: WatchedRedis, namespace: str, tmp_path: Path) -> RuntimeSettings:
    return RuntimeSettings(
        redis_url=watched.url,
        namespace=namespace,
        job="training",
        lease_ttl_s=30.0,
        checkpoint=str(tmp_path / "kept"),
        checkpoint_every_steps=3,
    )


def train_through_failovers(
    watched: WatchedRedis, settings: RuntimeSettings, out: Path, *, shards: int, failovers: int, lossy: bool
) -> None:
    """Train on shards of 20 records while the master is killed so often; check that each counts once."""
    with running_group(out, settings, shards=shards, epochs=1, step_s=0.1) as group:
        group.start(0, 1)
        group.await_generation(0, 1)
        for _ in range(failovers):
            group.await_steps(3)
            if lossy:
                watched.cut_replicas()
                group.await_steps(3)  # leases and reports of shards that only the master knows
            watched.replace_master()
        group.await_steps(1)
        (out / "quickly").touch()
        assert group.statuses() == {0: 0, 1: 0}, group.history()
    counted = Counter(sample for samples in stepped(out).values() for sample in samples)
    assert counted == dict.fromkeys(range(20 * shards), 1)


@pytest.mark.parametrize("lossy", [pytest.param(False, marks=pytest.mark.deep), True])
def test_a_failover_in_mid_training_loses_and_doubles_no_record(
    tmp_path: Path, watched: WatchedRedis, settings: RuntimeSettings, *, lossy: bool
) -> None:
    """Trainers, ledger and checkpoints go back together, whether or not the new master has the last writes."""
    train_through_failovers(watched, settings, tmp_path / "out", shards=150, failovers=1, lossy=lossy)


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_twenty_failovers_lose_and_double_no_record(
    tmp_path: Path, watched: WatchedRedis, settings: RuntimeSettings
) -> None:
    """In one training, each with lost writes; the old master comes back as a replica each time."""
    train_through_failovers(watched, settings, tmp_path / "out", shards=2000, failovers=20, lossy=True)


@pytest.mark.parametrize("failovers", [1, pytest.param(20, marks=pytest.mark.deep)])
def test_a_failover_in_mid_distillation_costs_no_batch(
    watched: WatchedRedis,
    good: Teacher,
    faulty: FaultyTeacher,
    *,
    failovers: int,
) -> None:
    """All are answered once, in order, and a teacher that registers with the new master is used."""
    settings = RuntimeSettings(redis_url=watched.url, lease_ttl_s=600.0, teacher_wait_s=60.0)
    batches = Batches(50, seconds=0.005)
    with (
        running_faulty_teacher(metadata_of(good.address)) as new,
        contextlib.ExitStack() as stack,
        registered(settings, good.address, faulty.address),
        reader_of(batches, Discovered(POOL), settings) as reader,
    ):
        read_until(reader, batches, all_answered(reader, 2))
        for _ in range(failovers):
            watched.cut_replicas()
            batches.check(read_epoch(reader, watched.replace_master))
        stack.enter_context(registered(settings, new.address))
        read_until(reader, batches, lambda: reader.stats().teachers == 3)
