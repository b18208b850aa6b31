"""Trainers that are stopped by SIGSTOP, with real agents, where no other rank waits for them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil
import pytest
from support.elastic.agent_group import running_group

from edl_runtime.settings import RuntimeSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = {"samples": 10**6, "global_batch": 24, "epochs": 1, "step_s": 0.05}
"""A training that does not end by itself."""


@pytest.fixture
def settings(settings: RuntimeSettings, tmp_path: Path) -> RuntimeSettings:
    return msgspec.structs.replace(
        settings, job="training", lease_ttl_s=30.0, checkpoint=str(tmp_path / "kept"), checkpoint_every_steps=10
    )


@pytest.mark.parametrize("instances", [(0,), pytest.param((0, 1, 2), marks=pytest.mark.deep)], ids=["alone", "all"])
def test_trainers_that_are_all_stopped_are_replaced(
    tmp_path: Path, settings: RuntimeSettings, instances: tuple[int, ...]
) -> None:
    """Nobody is left who could wait for them. The training continues from its last checkpoint."""
    with running_group(tmp_path / "out", settings, **LONG) as group:
        group.start(*instances)
        group.await_generation(*instances)
        group.await_event("saved")
        for instance in instances:
            group.trainer(instance).suspend()
        for instance in instances:
            told = group.await_event("failed", lambda event, instance=instance: event.instance == instance)
            assert "is stopped" in told.reason or "has been stopped" in told.reason
        group.await_steps(5)
        assert all(agent.poll() is None for agent in group.agents.values())


STOPS_ITSELF = """
import os, pathlib, signal, sys, time
name, when = sys.argv[1:]
if when == "at its import":
    from edl_runtime import elastic
if not pathlib.Path(name).exists():
    pathlib.Path(name).touch()
    os.kill(os.getpid(), signal.SIGSTOP)
if when == "at its import":
    elastic.init()
pathlib.Path(name + "-again").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["as a plain script", pytest.param("at its import", marks=pytest.mark.deep)])
def test_a_stopped_trainer_that_has_not_joined_is_replaced(
    tmp_path: Path, settings: RuntimeSettings, when: str
) -> None:
    """A plain script never tells where it is, an elastic one not before it calls `elastic.init`."""
    script, begun = tmp_path / "train.py", tmp_path / "begun"
    script.write_text(STOPS_ITSELF)
    with running_group(tmp_path / "out", settings, instances="1", command=[str(script), str(begun), when]) as group:
        group.start(0)
        told = group.await_event("failed")
        assert "its process has been stopped for 5 s" in told.reason
        group.await_condition(Path(f"{begun}-again").exists, "the next one begins")


def test_an_instance_whose_trainer_is_stopped_may_leave_without_a_checkpoint(
    tmp_path: Path, settings: RuntimeSettings
) -> None:
    """It is lost, as if killed: others train on, and if it is the last, the next continues from the checkpoint."""
    with running_group(tmp_path / "out", settings, **LONG) as group:
        group.start(0, 1)
        both = group.await_generation(0, 1)
        group.trainer(1).suspend()
        group.terminate(1)
        group.await_generation(0, after=both.generation)
        assert group.await_exit(1) == -15
        group.await_steps(5)
        saved = group.await_event("saved")

        agent = psutil.Process(group.agents[0].pid)
        agent.suspend()  # so that it knows of both at once, and does not replace its trainer before
        group.trainer(0).suspend()
        group.terminate(0)
        agent.resume()
        assert group.statuses() == {0: -15}, group.history()
        told = [event for event in group.events() if event.kind in ("failed", "ended")]
        assert told[-1].reason.endswith("its process is stopped, and it has to leave"), group.history()
        assert all(event.kind == "failed" for event in told)
        group.start(2)
        begun = group.await_generation(2)
        group.await_steps(1)
        first = min(each["step"] for each in group.stepped() if each["generation"] == begun.generation)
        assert first > (saved.step or 0), group.history()
