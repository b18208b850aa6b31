"""Generations that take long to form: as long as something comes of them they are waited for, and no longer."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from support.elastic.agent_group import Group, running_group
from support.elastic.fake_agent import open_gate
from support.elastic.impatient_agent import LIMIT_S

from edl_runtime.settings import RuntimeSettings

pytestmark = [pytest.mark.slow, pytest.mark.deep, pytest.mark.timeout(300)]

LONG = {"samples": 10**6, "global_batch": 24, "epochs": 1, "step_s": 0.05, "hidden": 3000}
"""A training that does not end by itself, and has 216 kB of state: 27 pieces."""


@pytest.fixture
def settings(redis_url: str, namespace: str) -> RuntimeSettings:
    """Settings of a training that keeps no checkpoints: what its trainers forget is lost."""
    return RuntimeSettings(redis_url=redis_url, namespace=namespace, job="training", lease_ttl_s=30.0)


def await_moves(group: Group, instance: int, count: int) -> None:
    """Wait until an instance is known to have moved so many pieces of the state."""
    group.await_members(
        lambda members: any(one["index"] == instance and one.get("moves", 0) >= count for one in members)
    )


def test_a_state_that_takes_long_to_be_given_survives(tmp_path: Path, settings: RuntimeSettings) -> None:
    """Live, where no checkpoints are kept: to give it up would be to begin anew."""
    with running_group(tmp_path / "out", settings, instances="1:2", impatient=True, **LONG, piece_s=0.4) as group:
        group.start(0)
        first = group.trains(0)
        group.start(1)
        both = group.trains(0, 1, after=first.generation)
        formed = group.await_event("active", lambda event: event.generation == both.generation)
        assert (both.generation, both.gear) == (first.generation + 1, "live"), group.story()
        assert formed.total_s is not None
        assert formed.total_s > 2 * LIMIT_S
        group.await_steps(5)
        group.check_no_step_twice()


def test_a_checkpoint_that_takes_long_to_read_is_read_once(tmp_path: Path, settings: RuntimeSettings) -> None:
    """All wait for it, in one generation, whatever its store takes for each answer."""
    kept = msgspec.structs.replace(settings, checkpoint=str(tmp_path / "kept"))
    with running_group(tmp_path / "out", kept, instances="2", impatient=True, **LONG) as group:
        group.start(0, 1)
        group.trains(0, 1)
        group.await_steps(5)
        group.terminate(0)
        group.terminate(1)
        assert group.statuses() == {0: -15, 1: -15}
        group.agents.clear()
        before = max(event.generation for event in group.events())

        group.option(**LONG, piece_s=0.3)
        group.start(0, 1)
        again = group.trains(0, 1, after=before)
        formed = group.await_event("active", lambda event: event.generation == again.generation)
        assert formed.total_s is not None
        assert formed.total_s > 2 * LIMIT_S
        group.await_steps(5)
        assert again.generation == before + 1, group.story()
        assert sum(group.log(instance).count("checkpoint.loaded") for instance in (0, 1)) == 1
        group.check_no_step_twice()


def test_who_ends_a_long_step_is_waited_for(tmp_path: Path, settings: RuntimeSettings) -> None:
    """It has the state, and all the while it computes."""
    with running_group(tmp_path / "out", settings, instances="1:2", impatient=True, **LONG, gates=[5]) as group:
        group.start(0)
        first = group.trains(0)
        group.await_steps(4)
        group.start(1)
        group.await_event("forming", lambda event: event.generation > first.generation)
        time.sleep(1.5 * LIMIT_S)
        assert group.events()[-1].kind == "forming", group.story()
        open_gate(group.out, 5)
        both = group.trains(0, 1, after=first.generation)
        assert (both.generation, both.gear) == (first.generation + 1, "live")
        group.await_steps(5)
        group.check_no_step_twice()


def test_a_trainer_that_stops_while_it_gives_the_state_is_replaced(tmp_path: Path, settings: RuntimeSettings) -> None:
    """As at the end of a step; another gives it then."""
    with running_group(tmp_path / "out", settings, instances="2:3", **LONG, piece_s=0.2) as group:
        group.start(0, 1)
        first = group.trains(0, 1)
        group.start(2)
        joining = group.await_event("forming", lambda event: 2 in event.members)
        await_moves(group, 2, 5)
        source, other = first.members
        group.trainer(source).suspend()
        stopped = group.await_event("failed", lambda event: event.instance == source)
        assert "is stopped" in stopped.reason
        after = group.trains(other, 2, after=joining.generation)
        assert (after.generation, after.gear) == (joining.generation + 1, "live")
        group.await_steps(5)
        group.check_no_step_twice(killed=1)


def test_a_trainer_that_stops_while_it_takes_the_state_is_replaced(tmp_path: Path, settings: RuntimeSettings) -> None:
    """Nobody else waits than who gives it, and keeps it."""
    with running_group(tmp_path / "out", settings, instances="1:2", **LONG, piece_s=0.4) as group:
        group.start(0)
        first = group.trains(0)
        group.start(1)
        joining = group.await_event("forming", lambda event: event.generation > first.generation)
        await_moves(group, 1, 5)
        group.trainer(1).suspend()
        stopped = group.await_event("failed", lambda event: event.instance == 1)
        assert "is stopped" in stopped.reason
        alone = group.trains(0, after=joining.generation)
        assert (alone.generation, alone.gear) == (joining.generation + 1, "live")
        group.await_steps(5)
        group.check_no_step_twice()
