"""Trainers that lease shards from a ledger: real processes, real gloo, a real Redis."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from elastic_agents import Trainer, join, leave, stepped, trainers

from edl_runtime.elastic.messages import Finished, Lost, Ready, Stepped, Up

pytestmark = pytest.mark.slow

ALL_TWICE = dict.fromkeys(range(240), 2)


@pytest.fixture
def environ(redis_url: str, namespace: str) -> dict[str, str]:
    return {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace, "EDL_JOB": "sharded"}


def counted(out: Path) -> Counter[int]:
    return Counter(number for samples in stepped(out).values() for number in samples)


def lines_of(out: Path, trainer: Trainer) -> int:
    file = out / f"stepped-{trainer.process.pid}.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_records_count_once_an_epoch_whoever_dies_and_joins(tmp_path: Path, environ: dict[str, str]) -> None:
    """The shard of a killed trainer is finished by others, from where the model has it."""
    options: dict[str, Any] = {"shards": 12, "epochs": 2, "step_s": 0.15, "environ": environ}
    with trainers(tmp_path, 3, **options) as [first, second, third]:
        for trainer in (first, second, third):
            trainer.await_word(Ready)
        join([first, second], 1)
        second.await_word(Stepped)
        join([first, second, third], 2)
        third.await_word(Stepped)
        before = lines_of(tmp_path, first)
        while lines_of(tmp_path, first) == before:
            pass
        first.process.kill()  # in the middle of a batch: what it stepped is written down
        for trainer in (second, third):
            trainer.await_word(Lost)
        join([second, third], 3)
        assert [trainer.await_word(Finished).why for trainer in (second, third)] == ["done"] * 2
        assert [trainer.wait() for trainer in (second, third)] == [0, 0]
    assert counted(tmp_path) == ALL_TWICE


def test_the_ledger_goes_back_with_the_checkpoint(tmp_path: Path, environ: dict[str, str]) -> None:
    """What was done after it is done again; a shard that can't be read is set aside, and all else counts once."""
    environ |= {"EDL_CHECKPOINT": str(tmp_path / "kept")}
    options: dict[str, Any] = {"shards": 6, "epochs": 1, "step_s": 0.1, "environ": environ, "poison": 47}
    with trainers(tmp_path / "out", 2, **options) as both:
        for trainer in both:
            trainer.await_word(Ready)
        join(both, 1)
        both[0].await_word(Stepped, lambda word: word.step > 2)
        leave(both[0])
        leave(both[1], checkpoint=True)
        done = both[0].await_word(Finished).step
        assert [trainer.wait() for trainer in both] == [0, 0]
        both.append(Trainer(tmp_path / "out", **options))
        both[2].await_word(Ready)
        join([both[2]], 2)
        assert both[2].await_word(Up).step == done
        assert both[2].await_word(Finished).why == "done"
        assert both[2].wait() == 0
    found = counted(tmp_path / "out")
    assert set(found.values()) == {1}
    assert found.keys() | set(range(40, 60)) == set(range(120))
    assert 47 not in found
