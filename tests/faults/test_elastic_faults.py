"""Trainings in which agents, trainers and Redis fail: with real processes, several faults a training."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_group import running_group
from elastic_agents import batches_of, stepped
from proxy import running_proxy

from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.server import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = {"samples": 10**5, "global_batch": 24, "epochs": 1, "step_s": 0.05}
"""A training that does not end by itself."""


@pytest.fixture
def settings(redis_url: str, namespace: str, tmp_path: Path) -> RuntimeSettings:
    return RuntimeSettings(redis_url=redis_url, namespace=namespace, job="training", checkpoint=str(tmp_path / "kept"))


def test_a_training_outlives_its_redis_and_its_partitions(
    tmp_path: Path, own_redis: RedisServer, settings: RuntimeSettings
) -> None:
    """Redis away stops nobody; empty, it gets the generation back; who is cut off from it ends its side and comes back.

    Who is told to leave while another joins is heard, and an instance that dies as it joins costs only a pause.
    """
    settings = RuntimeSettings(**{**_fields(settings), "redis_url": own_redis.url})
    with (
        running_proxy("127.0.0.1", own_redis.port) as proxy,
        running_group(tmp_path / "out", settings, **LONG) as group,
    ):
        group.start(0)
        group.start(1, url=own_redis.url.replace(f":{own_redis.port}/", f":{proxy.port}/"))
        first = group.trains(0, 1)

        own_redis.kill()
        group.await_steps(20)
        own_redis.start()
        group.await_event("restored")
        group.await_steps(20)
        assert {event.generation for event in group.events() if event.kind in ("restored", "forming")} == {
            first.generation
        }

        proxy.cut()
        alone = group.trains(0, after=first.generation)
        assert alone.reason == "instance 1 is gone"
        proxy.mend()
        both = group.trains(0, 1, after=alone.generation)
        assert "the others go on without it" in group.log(1)

        group.start(2)
        group.await_event("forming", lambda event: 2 in event.members)
        group.terminate(1)
        changed = group.trains(0, 2, after=both.generation)
        assert (changed.gear, changed.generation) == ("live", both.generation + 2), group.story()
        assert group.forget(1) == -15

        group.start(3)
        group.await_event("forming", lambda event: 3 in event.members)
        group.kill(3)
        group.trains(0, 2, after=changed.generation + 1)
        assert {event.gear for event in group.events() if event.kind == "forming"} == {"live"}, group.story()
        group.await_steps(10)
        assert all(agent.poll() is None for agent in group.agents.values())


def _fields(settings: RuntimeSettings) -> dict[str, object]:
    return {field: getattr(settings, field) for field in settings.__struct_fields__}


def test_a_training_goes_on_when_all_of_it_was_killed(tmp_path: Path, settings: RuntimeSettings) -> None:
    """From the newest checkpoint, in a generation above all before; what was lost since is trained again."""
    samples, batch = 24 * 150, 24
    keeping = RuntimeSettings(**{**_fields(settings), "checkpoint_every_steps": 10})
    options = {"samples": samples, "global_batch": batch, "epochs": 1, "step_s": 0.05}
    with running_group(tmp_path / "out", keeping, instances="2", **options) as group:
        group.start(0, 1)
        first = group.trains(0, 1)
        group.await_event("saved", lambda event: (event.step or 0) >= 20)
        group.kill(0)
        group.kill(1)
        group.start(0, 1)
        group.trains(0, 1, after=first.generation)
        assert group.statuses() == {0: 0, 1: 0}
        assert stepped(group.out) == batches_of(samples, batch, 1)


def test_wrong_input_fails_the_job_at_once(tmp_path: Path, settings: RuntimeSettings) -> None:
    """No other try would fare better: all agents end, the one whose script says so with its words and status 78."""
    with running_group(tmp_path / "out", settings, global_batch=2) as group:
        group.start(0, 1)
        assert set(group.statuses().values()) <= {78, 1}
        assert 78 in group.statuses().values()
        assert "global_batch: got 2, allowed is 4 or more" in group.await_event("ended").reason


def test_a_rank_that_goes_early_fails_the_job(tmp_path: Path, settings: RuntimeSettings) -> None:
    """The others don't wait for ever, and all are told which rank it was and at which step."""
    with running_group(tmp_path / "out", settings, instances="2", leave_at={"1": 3}, **LONG) as group:
        group.start(0, 1)
        assert 0 not in group.statuses().values()
        ended = group.await_event("ended")
        assert ended.outcome == "failed"
        assert "rank 1" in ended.reason


def test_a_script_that_fails_again_and_again_fails_the_job(tmp_path: Path, settings: RuntimeSettings) -> None:
    """Its trainer is replaced three times; without progress in between the fourth failure is the job's."""
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(0.2)\nraise ValueError('not today')\n")
    with running_group(tmp_path / "out", settings, instances="1", command=[str(script)]) as group:
        group.start(0)
        assert group.statuses() == {0: 1}
        ended = group.await_event("ended")
        assert ended.reason == "instance 0: ValueError: not today; no progress since 3 others were replaced"
        assert len([event for event in group.events() if event.kind == "failed"]) == 3
        assert f"edl: {ended.reason}" in group.log(0)
