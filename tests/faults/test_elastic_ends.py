"""Trainings whose instances come, or die, in the moment in which all is trained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from support.elastic.agent_group import PATIENCE_S, Group, running_group
from support.elastic.fake_agent import batches_of, open_gate, stepped
from support.paths import TRAINING_SCRIPTS

from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.deep, pytest.mark.timeout(300)]

SCRIPT = TRAINING_SCRIPTS / "ending_script.py"
GATE = 4
ALL = batches_of(150, 64, 2)


@pytest.fixture
def settings(redis_url: str, namespace: str) -> RuntimeSettings:
    return RuntimeSettings(redis_url=redis_url, namespace=namespace, job="training", lease_ttl_s=30.0)


@contextmanager
def ending_group(out: Path, settings: RuntimeSettings) -> Iterator[Group]:
    """Yield instances 0 and 1, rank 0 of which is about to write what they have trained; see ending_script."""
    with running_group(out, settings, command=[str(SCRIPT), str(out)], gates=[GATE]) as group:
        group.start(0, 1)
        both = group.await_event("forming", lambda event: set(event.members) == {0, 1}).generation
        group.await_members(lambda members: any(one.get("came_on") or one.get("up") == both for one in members))
        open_gate(out, GATE)  # whoever has trained alone so far knows of the other
        until = time.monotonic() + PATIENCE_S
        while not (out / "writing").exists():
            assert time.monotonic() < until, group.story()
            time.sleep(0.02)
        yield group


def test_the_last_checkpoint_is_written_though_its_writer_dies(tmp_path: Path, settings: RuntimeSettings) -> None:
    """By one of those who have the state, too; nothing is trained again, and nobody is waited for."""
    keeping = msgspec.structs.replace(settings, checkpoint=str(tmp_path / "kept"))
    with ending_group(tmp_path / "out", keeping) as group:
        both = group.trains(0, 1)
        writer, other = both.members
        group.kill(writer)
        alone = group.trains(other, after=both.generation)
        assert alone.gear == "live"
        (group.out / "gate-end").touch()
        assert group.statuses() == {other: 0}
        assert group.await_event("ended").outcome == "done"
    assert stepped(group.out) == ALL
    (kept,) = CheckpointStore(Checkpoint(url=keeping.checkpoint)).list()
    assert kept.manifest.step == len(ALL)


def test_who_comes_when_all_is_trained_trains_nothing(tmp_path: Path, settings: RuntimeSettings) -> None:
    """Neither does it begin anew, nor wait for those who won't come, though it was to be among them."""
    with ending_group(tmp_path / "out", settings) as group:
        group.start(2)
        with_it = group.await_event("forming", lambda event: 2 in event.members)
        assert set(with_it.members) == {0, 1, 2}
        (group.out / "gate-write").touch()
        without = group.await_event("forming", lambda event: event.generation > with_it.generation)
        assert 2 not in without.members
        assert without.reason == "the others came when all had been trained"
        (group.out / "gate-end").touch()
        assert group.statuses() == {0: 0, 1: 0, 2: 0}
        assert group.await_event("ended").outcome == "done"
    assert stepped(group.out) == ALL
    assert len(list(group.out.glob("stepped-*.jsonl"))) <= 2
