"""Trainers that lease shards from a ledger: real processes, real sockets, a real Redis."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
import structlog
from support.elastic.fake_agent import Trainer, join, open_gate, read_json_lines, stepped, trainers
from support.elastic.local_run import SAMPLES, RecordingClient, model_and_optimizer, train
from support.teachers.process import wait_until

from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.elastic.api import Run
from edl_runtime.elastic.comm.agent_protocol import (
    CheckpointSaved,
    GenerationEntered,
    GenerationLost,
    Note,
    StepDone,
    WorkerFinished,
    WorkerReady,
)
from edl_runtime.elastic.data import sharded
from edl_runtime.elastic.training.checkpointing import CheckpointManager
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Checkpoint
from edl_runtime.store import keys
from edl_runtime.store.redis_server import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ALL_TWICE = dict.fromkeys(range(240), 2)


@pytest.fixture
def environ(redis_url: str, namespace: str) -> dict[str, str]:
    return {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace, "EDL_JOB": "sharded"}


def counted(out: Path) -> Counter[int]:
    return Counter(number for samples in stepped(out).values() for number in samples)


def steps_of(out: Path, trainer: Trainer) -> set[int]:
    file = out / f"stepped-{trainer.process.pid}.jsonl"
    return {line["step"] for line in read_json_lines([file])} if file.exists() else set()


def test_records_count_once_an_epoch_whichever_rank_dies_or_joins(tmp_path: Path, environ: dict[str, str]) -> None:
    """The shard of a killed trainer is finished by others, from where the model has it."""
    options: dict[str, Any] = {"shards": 12, "epochs": 2, "gates": [4, 9], "environ": environ}
    with trainers(tmp_path, 3, **options) as [first, second, third]:
        join([first, second], 1)
        second.await_message(StepDone)
        join([first, second, third], 2)
        open_gate(tmp_path, 4)
        third.await_message(StepDone)
        wait_until(lambda: 8 in steps_of(tmp_path, first))
        first.process.kill()  # in the middle of a batch: what it stepped is written down
        open_gate(tmp_path, 9)
        for trainer in (second, third):
            trainer.await_message(GenerationLost)
        join([second, third], 3)
        assert [trainer.await_message(WorkerFinished).why for trainer in (second, third)] == ["done"] * 2
        assert [trainer.wait() for trainer in (second, third)] == [0, 0]
    assert counted(tmp_path) == ALL_TWICE


def test_a_redis_that_forgot_the_ledger_sends_all_ranks_back_together(
    tmp_path: Path, environ: dict[str, str], redis_url: str, namespace: str
) -> None:
    """Whoever notices it tells all others in a step, and none is left waiting; model and ledger then go back."""
    environ |= {"EDL_CHECKPOINT": str(tmp_path / "kept"), "EDL_CHECKPOINT_EVERY_STEPS": "3"}
    options: dict[str, Any] = {"shards": 12, "epochs": 1, "gates": [7], "environ": environ}
    with trainers(tmp_path / "out", 3, **options) as first:
        join(first, 1)
        saved = max(trainer.await_message(CheckpointSaved).step for trainer in first[:1])
        with redis.Redis.from_url(redis_url) as client:
            assert client.delete(*keys.ledger_keys(namespace, "sharded"))
        open_gate(tmp_path / "out", 7)
        all_go_back(first, tmp_path / "out", options, saved)
    assert counted(tmp_path / "out") == dict.fromkeys(range(240), 1)


def all_go_back(first: list[Trainer], out: Path, options: dict[str, Any], saved: int) -> None:
    """Wait until all trainers have ended together, and until two others have trained the rest from a checkpoint."""
    assert [trainer.wait() for trainer in first] == [1] * len(first)
    assert [trainer.received(GenerationLost) for trainer in first] == [[]] * len(first)
    with trainers(out, 2, **options) as second:
        join(second, 3)
        assert second[0].await_message(GenerationEntered).step >= saved
        assert [trainer.await_message(WorkerFinished).why for trainer in second] == ["done"] * 2
        assert [trainer.wait() for trainer in second] == [0, 0]


@pytest.mark.deep
def test_a_redis_that_came_back_older_sends_all_ranks_back_together(
    tmp_path: Path, environ: dict[str, str], own_redis: RedisServer, namespace: str
) -> None:
    """It has forgotten who holds a shard, and would lease it to another as well; no rank takes anything of it."""
    environ |= {"EDL_REDIS_URL": own_redis.url}
    environ |= {"EDL_CHECKPOINT": str(tmp_path / "kept"), "EDL_CHECKPOINT_EVERY_STEPS": "3"}
    options: dict[str, Any] = {"shards": 12, "epochs": 1, "environ": environ, "gates": [2, 4]}
    out = tmp_path / "out"
    with trainers(out, 1, **options) as both:
        both.append(Trainer(out, **options, shard_batch=4))  # slower, so not both begin a shard in the same step
        both[1].await_message(WorkerReady)
        join(both, 1)
        with redis.Redis.from_url(own_redis.url) as client:
            await_leases(client, namespace, 2)
            client.save()
            open_gate(out, 2)
            saved = both[0].await_message(CheckpointSaved).step
            await_leases(client, namespace, 3)
        own_redis.kill()
        own_redis.start()
        open_gate(out, 4)
        all_go_back(both, out, options, saved)
    assert counted(out) == dict.fromkeys(range(240), 1)


def await_leases(client: redis.Redis, namespace: str, count: int) -> None:
    """Wait until so many shards have been leased."""
    deadline = time.monotonic() + 150
    while client.hget(keys.ledger_keys(namespace, "sharded")[0], "next") != str(count).encode():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Storage:
    """Shards of two samples each, of which some reads fail at first, and those of one shard always."""

    def __init__(self, *, failures: int = 0, poisoned: str = "") -> None:
        self._failures = failures
        self._poisoned = poisoned

    def read(self, name: str) -> Iterator[tuple[np.ndarray, np.int64]]:
        self._failures -= 1
        if self._failures >= 0:
            raise OSError("no route to host")
        if name == self._poisoned:
            raise ValueError("torn")
        yield from SAMPLES[2 * int(name) : 2 * int(name) + 2]


def trained(storage: Storage, settings: RuntimeSettings) -> tuple[list[int], list[str]]:
    """Train on five shards in this process; return the samples in order, and the notes for the job's owner."""
    link = RecordingClient()
    run = Run(link, CheckpointManager(None, link), settings)
    model, _ = run.wrap(*model_and_optimizer())
    batches = train(run, model, run.shards(storage.read, list("01234"), batch_size=2))
    samples = [sample for batch in batches for sample in batch]
    return samples, [note.text for note in link.sent if isinstance(note, Note)]


def test_a_storage_that_is_away_for_a_moment_costs_no_shard(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that can't be read is kept for a while and tried again, the second in a row for twice as long."""
    monkeypatch.setattr(sharded, "RETRY_HOLD_S", 0.01)
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, job="storage")
    with structlog.testing.capture_logs() as logs:
        samples, notes = trained(Storage(failures=2), settings)
    assert (samples, notes) == (list(range(10)), [])
    assert [log["held_s"] for log in logs if log["event"] == "shard.failed"] == [0.01, 0.02]


def test_a_shard_that_is_set_aside_is_reported(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event says which one and why, and the result how many; all others count."""
    monkeypatch.setattr(sharded, "RETRY_HOLD_S", 0.01)
    result = tmp_path / "result"
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, job="storage", result_file=str(result))
    samples, notes = trained(Storage(poisoned="2"), settings)
    assert sorted(samples) == [0, 1, 2, 3, 6, 7, 8, 9]
    (note,) = notes
    assert note.startswith("shard '2' was set aside in epoch 0 because it failed too often; its first 0 records are")
    assert note.endswith("Last failure: ValueError: torn")
    assert msgspec.json.decode(result.read_bytes())["metrics"]["shards_set_aside"] == 1


def test_the_last_checkpoint_says_that_all_epochs_are_over(redis_url: str, namespace: str, tmp_path: Path) -> None:
    """As `run.epoch` does then, also in a run that finds nothing to do; a sensor may wait for that."""
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, job="ends")
    link, place = RecordingClient(), Checkpoint(url=str(tmp_path), every_steps=4)
    epochs: list[int] = []
    for _ in range(2):
        run = Run(link, CheckpointManager(place, link), settings)
        model, _ = run.wrap(*model_and_optimizer())
        shards = run.shards(Storage().read, list("01234"), batch_size=2, epochs=3)
        train(run, model, shards, after=lambda: epochs.append(run.epoch))  # noqa: B023 -- called at once
        assert epochs == [0] * 5 + [1] * 5 + [2] * 5
        assert run.epoch == 3
        last, *others = CheckpointStore(place).list()
        assert (last.manifest.step, last.manifest.epoch) == (15, 3)
        assert {each.manifest.epoch for each in others if each.manifest.step < 15} <= {0, 1, 2}
