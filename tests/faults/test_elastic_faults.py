"""Trainings in which agents, trainers and Redis fail: with real processes, several faults a training."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import redis
from support.autoscale.jobs import running_job
from support.elastic.agent_group import SCRIPT, Group, running_group
from support.elastic.fake_agent import batches_of, open_gate, stepped
from support.elastic.impatient_agent import LIMIT_S
from support.network.proxy import running_proxy
from support.paths import TRAINING_SCRIPTS

from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.elastic.rendezvous.requests import request_stop
from edl_runtime.errors import EX_CONFIG
from edl_runtime.monitor import reports
from edl_runtime.monitor.snapshot import job_line
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Checkpoint
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = {"samples": 10**5, "global_batch": 24, "epochs": 1, "step_s": 0.05}
"""A training that does not end by itself."""

LARGE = {**LONG, "samples": 10**6, "hidden": 3000}
"""One that has 216 kB of state besides: 27 pieces."""

GROUP_PARTS = ("leases", "records", "beats", "state", "events")

ENDING_SCRIPT = TRAINING_SCRIPTS / "ending_script.py"
BOTH_EPOCHS = batches_of(150, 64, 2)


@pytest.fixture
def settings(redis_url: str, namespace: str, tmp_path: Path) -> RuntimeSettings:
    return RuntimeSettings(
        redis_url=redis_url, namespace=namespace, job="training", lease_ttl_s=30.0, checkpoint=str(tmp_path / "kept")
    )


@pytest.fixture
def bare(settings: RuntimeSettings) -> RuntimeSettings:
    """Settings of a training that keeps no checkpoints: what its trainers forget is lost."""
    return msgspec.structs.replace(settings, checkpoint="")


def test_a_training_outlives_its_redis(tmp_path: Path, own_redis: RedisServer, settings: RuntimeSettings) -> None:
    """While it is away nobody stops; one that came back empty gets the generation back."""
    settings = msgspec.structs.replace(settings, redis_url=own_redis.url)
    with running_group(tmp_path / "out", settings, **LONG) as group:
        group.start(0, 1)
        first = group.await_generation(0, 1)
        own_redis.kill()
        group.await_steps(20)
        own_redis.start()
        group.await_event("restored")
        group.await_steps(20)
        told = {event.generation for event in group.events() if event.kind in ("restored", "forming")}
        assert told == {first.generation}
        assert all(agent.poll() is None for agent in group.agents.values())


def test_a_checkpoint_of_an_outage_has_the_time_when_it_was_written(
    tmp_path: Path, own_redis: RedisServer, settings: RuntimeSettings
) -> None:
    """Not that at which Redis was back."""
    settings = msgspec.structs.replace(settings, redis_url=own_redis.url, checkpoint_every_steps=10)
    with running_group(tmp_path / "out", settings, instances="1", **LONG) as group:
        group.start(0)
        group.await_event("saved")
        away_at = time.time()
        own_redis.kill()
        group.await_steps(60)
        back_at = time.time()
        own_redis.start()
        late = group.await_event("saved", lambda event: event.delay_s > 0)
        assert away_at < late.at < back_at


def test_a_training_that_redis_does_not_hear_of_is_seen_to_stand_still(
    tmp_path: Path, settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever reaches Redis while its trainers don't, for as long as they don't."""
    monkeypatch.setattr(reports, "SILENT_AFTER_S", 3.0)
    monkeypatch.setattr(reports, "STILL_AFTER_S", 600.0)
    port = urlsplit(settings.redis_url).port
    assert port is not None
    with (
        running_proxy("127.0.0.1", port) as proxy,
        running_group(tmp_path / "out", settings, shards=10**4, shard_batch=8, epochs=1, step_s=0.05) as group,
    ):
        group.start(0, url=settings.redis_url.replace(f":{port}/", f":{proxy.port}/"))
        group.await_steps(5)
        group.await_condition(lambda: not trouble_of(settings), "no standstill")  # its agent may have stood still
        proxy.cut()
        group.await_condition(lambda: trouble_of(settings), "a standstill")
        why = "its instances can't reach Redis, or are stopped"
        assert re.fullmatch(rf"no report for \d+s: {why}", trouble_of(settings))
        proxy.mend()
        group.await_condition(lambda: not trouble_of(settings), "the end of the standstill")
        group.await_steps(5)


def test_a_training_whose_worker_was_killed_says_so_until_it_has_got_further(
    tmp_path: Path, bare: RuntimeSettings
) -> None:
    """It makes steps meanwhile, those that were lost, and would look healthy."""
    with running_group(tmp_path / "out", bare, instances="1", **LONG) as group:
        group.start(0)
        group.await_steps(40)
        group.trainer(0).kill()
        group.await_condition(lambda: trouble_of(bare), "a word about the restart")
        how = r"instance 0: its worker was killed by SIGKILL \(.*\); restarted 1 time without progress since step \d+"
        assert re.fullmatch(how, trouble_of(bare))
        group.await_condition(lambda: not trouble_of(bare), "the step that it had reached")
        assert len(group.stepped()) > 80


def trouble_of(settings: RuntimeSettings) -> str:
    """Return what `edl jobs` says of the training."""
    job = running_job(settings.job, 1, created_at=0.0)

    async def read() -> str:
        async with connect(settings.redis_url) as client:
            found = await reports.read_reports(client, settings.namespace, [job])
        return job_line(job, found[settings.job]).trouble

    return asyncio.run(read())


@pytest.mark.parametrize("part", ["checkpoints", *(pytest.param(each, marks=pytest.mark.deep) for each in GROUP_PARTS)])
def test_a_training_outlives_a_key_of_another_type(tmp_path: Path, settings: RuntimeSettings, part: str) -> None:
    """The log names it once. Training goes on, and reports again once it is deleted."""
    settings = msgspec.structs.replace(settings, checkpoint_every_steps=10)
    of_group = dict(zip(GROUP_PARTS, keys.group_keys(settings.namespace, settings.job), strict=False))
    key = of_group.get(part) or keys.checkpoints(settings.namespace, settings.job)
    word = "reports.delayed" if part in ("checkpoints", "events") else "redis.disconnected"
    with running_group(tmp_path / "out", settings, **LONG) as group, redis.Redis.from_url(settings.redis_url) as client:
        group.start(0, 1)
        group.await_generation(0, 1)
        group.await_steps(5)
        client.pipeline().delete(key).sadd(key, "?").execute()
        group.await_condition(lambda: word in group.logs(), "the log says so")
        group.await_steps(30)
        assert group.log(0).count(word) + group.log(1).count(word) <= 2
        client.delete(key)
        group.await_steps(30)
        stop(settings)
        assert group.statuses() == {0: 0, 1: 0}, group.history()
        assert client.exists(key) or word != "reports.delayed"
        group.check_no_step_twice()


@pytest.mark.deep
def test_a_training_outlives_partitions(tmp_path: Path, own_redis: RedisServer, settings: RuntimeSettings) -> None:
    """Who is cut off comes back; who leaves while another joins is heard; who dies as it joins costs only a pause."""
    settings = msgspec.structs.replace(settings, redis_url=own_redis.url, lease_ttl_s=12.0)
    with (
        running_proxy("127.0.0.1", own_redis.port) as proxy,
        running_group(tmp_path / "out", settings, **LONG) as group,
    ):
        group.start(0)
        group.start(1, url=own_redis.url.replace(f":{own_redis.port}/", f":{proxy.port}/"))
        first = group.await_generation(0, 1)
        proxy.cut()
        alone = group.await_generation(0, after=first.generation)
        assert alone.reason == "instance 1 is gone"
        proxy.mend()
        both = group.await_generation(0, 1, after=alone.generation)
        assert "the others continue without it" in group.log(1)

        group.start(2)
        group.await_event("forming", lambda event: 2 in event.members)
        group.terminate(1)
        changed = group.await_generation(0, 2, after=both.generation)
        assert changed.gear == "live", group.history()
        assert group.await_exit(1) == -15

        group.start(3)
        group.await_event("forming", lambda event: 3 in event.members)
        group.kill(3)
        group.await_generation(0, 2, after=changed.generation + 1)
        assert {event.gear for event in group.events() if event.kind == "forming"} == {"live"}, group.history()
        group.await_steps(10)
        assert all(agent.poll() is None for agent in group.agents.values())


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"samples": 10**5 + 1}, "the dataset has 100001 samples, and had 100000"),
        pytest.param({"hidden": 9}, "'0.weight': float32 (4, 9) here, float32 (4, 8) there", marks=pytest.mark.deep),
    ],
)
def test_a_newcomer_with_wrong_input_gives_up_alone(
    tmp_path: Path, bare: RuntimeSettings, wrong: dict[str, int], reason: str
) -> None:
    """It has other data or another model than the others, who lose no step though they keep no checkpoints."""
    with running_group(tmp_path / "out", bare, **LONG) as group:
        group.start(0)
        group.await_steps(5)
        group.option(**LONG | wrong)
        group.start(1)
        told = group.await_event("failed")
        assert told.instance == 1
        assert reason in told.reason
        assert told.reason.endswith("it gives up, and the others continue")
        assert group.await_exit(1) == EX_CONFIG
        assert f"edl: instance 1: {told.reason}" in group.log(1)
        group.await_steps(5)
        assert {event.gear for event in group.events() if event.kind == "forming"} == {"live"}, group.history()
        group.check_no_step_twice()
        stop(bare)
        assert group.statuses() == {0: 0}, group.history()
        assert [event.outcome for event in group.events() if event.kind == "ended"] == ["stopped"]


@pytest.mark.deep
def test_a_newcomer_that_can_not_start_gives_up_alone(tmp_path: Path, settings: RuntimeSettings) -> None:
    """Its trainer is replaced three times while the others make steps; the fourth that falls is its own last."""
    script = tmp_path / "train.py"
    script.write_text(f"""
import os, runpy
from edl_runtime import elastic
if os.environ["EDL_INSTANCE"] == "1":
    raise OSError("a bad disk")
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
""")
    out = tmp_path / "out"
    with running_group(out, settings, command=[str(script), str(out)], **LONG) as group:
        group.start(0)
        group.await_steps(5)
        group.start(1)
        assert group.await_exit(1) == EX_CONFIG
        told = [event for event in group.events() if event.kind == "failed"]
        assert [event.instance for event in told] == [1] * 4
        assert told[-1].reason.startswith("OSError: a bad disk; no step of its own in 3 restarts")
        group.await_steps(5)
        stop(settings)
        assert group.statuses() == {0: 0}, group.history()


def test_a_job_whose_last_checkpoint_is_not_written_fails(tmp_path: Path, settings: RuntimeSettings) -> None:
    """All are told to end, and its writer can't write: event and exit status say so, and what is there instead."""
    kept = Path(settings.checkpoint)
    settings = msgspec.structs.replace(settings, checkpoint_every_steps=20)
    with running_group(tmp_path / "out", settings, **LONG) as group:
        group.start(0, 1)
        group.await_generation(0, 1)
        saved = group.await_event("saved")
        group.await_event("saved", lambda event: (event.step or 0) > (saved.step or 0))
        kept.rename(tmp_path / "elsewhere")
        kept.write_text("no folder")
        stop(settings)
        statuses = group.statuses()
        ended = group.await_event("ended")
        assert (ended.outcome, 1 in statuses.values(), 0 in statuses.values()) == ("failed", True, False), (
            group.history()
        )
        assert "the last checkpoint is not written" in ended.reason
        assert "the last checkpoint is of step " in ended.reason
        assert f"edl: {ended.reason}" in group.logs()


@pytest.mark.deep
def test_a_last_checkpoint_that_takes_too_long_fails_the_job(tmp_path: Path, settings: RuntimeSettings) -> None:
    """Its writer is ended before its instance's grace is over, and the job says what was lost by that."""
    settings = msgspec.structs.replace(settings, grace_s=2.0)
    with running_group(tmp_path / "out", settings, save_s=600.0, **LONG) as group:
        group.start(0)
        group.await_steps(5)
        group.terminate(0)
        assert group.statuses() == {0: 1}
        why = "its worker was killed: it did not leave in time; there is no checkpoint"
        assert group.await_event("ended").reason == f"instance 0: the last checkpoint is not written: {why}"


def stop(settings: RuntimeSettings) -> None:
    """Ask the job to end with a checkpoint."""

    async def ask() -> bool:
        async with connect(settings.redis_url) as client:
            return await request_stop(client, settings.namespace, settings.job, "a test")

    assert asyncio.run(ask())


def test_a_script_that_fails_again_and_again_fails_the_job(tmp_path: Path, settings: RuntimeSettings) -> None:
    """Its trainer is replaced three times; without progress in between the fourth failure is the job's."""
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(0.2)\nraise ValueError('not today')\n")
    with running_group(tmp_path / "out", settings, instances="1", command=[str(script)]) as group:
        group.start(0)
        assert group.statuses() == {0: 1}
        ended = group.await_event("ended")
        assert ended.reason == "instance 0: ValueError: not today; no progress in 3 restarts"
        assert len([event for event in group.events() if event.kind == "failed"]) == 3
        assert f"edl: {ended.reason}" in group.log(0)


@pytest.mark.deep
def test_instances_with_other_data_do_not_begin_together(tmp_path: Path, settings: RuntimeSettings) -> None:
    """Who has other data than rank 0 goes before the first step, and says what differs; two are the fewest here."""
    with running_group(tmp_path / "out", settings, instances="2", **LONG) as group:
        group.start(0)
        group.option(**{**LONG, "samples": 10**4})
        group.start(1)
        assert 65 in group.statuses().values()
        ended = group.await_event("ended")
        assert "DatasetChangedError" in ended.reason
        assert "10000" in ended.reason
        assert "100000" in ended.reason
        assert group.stepped() == []


@contextmanager
def ending_group(out: Path, settings: RuntimeSettings) -> Iterator[Group]:
    """Yield instances 0 and 1, rank 0 of which is about to write what they have trained; see ending_script."""
    with running_group(out, settings, command=[str(ENDING_SCRIPT), str(out)], gates=[4]) as group:
        group.start(0, 1)
        both = group.await_event("forming", lambda event: set(event.members) == {0, 1}).generation
        group.await_members(lambda members: any(one.get("advanced") or one.get("up") == both for one in members))
        open_gate(out, 4)  # whoever has trained alone so far knows of the other
        group.await_condition((out / "writing").exists, "the last checkpoint")
        yield group


@pytest.mark.deep
def test_the_last_checkpoint_is_written_though_its_writer_dies(tmp_path: Path, settings: RuntimeSettings) -> None:
    """By one of those who have the state, too; nothing is trained again, and nobody is waited for."""
    with ending_group(tmp_path / "out", settings) as group:
        both = group.await_generation(0, 1)
        writer, other = both.members
        group.kill(writer)
        alone = group.await_generation(other, after=both.generation)
        assert alone.gear == "live"
        (group.out / "gate-end").touch()
        assert group.statuses() == {other: 0}
        assert group.await_event("ended").outcome == "done"
    assert stepped(group.out) == BOTH_EPOCHS
    (kept,) = CheckpointStore(Checkpoint(url=settings.checkpoint)).list()
    assert kept.manifest.step == len(BOTH_EPOCHS)


@pytest.mark.deep
def test_who_comes_when_all_is_trained_trains_nothing(tmp_path: Path, bare: RuntimeSettings) -> None:
    """Neither does it begin anew, nor wait for those who won't come, though it was to be among them."""
    with ending_group(tmp_path / "out", bare) as group:
        group.start(2)
        with_it = group.await_event("forming", lambda event: 2 in event.members)
        assert set(with_it.members) == {0, 1, 2}
        (group.out / "gate-write").touch()
        without = group.await_event("forming", lambda event: event.generation > with_it.generation)
        assert 2 not in without.members
        assert without.reason == "the others came after everything had been trained"
        (group.out / "gate-end").touch()
        assert group.statuses() == {0: 0, 1: 0, 2: 0}
        assert group.await_event("ended").outcome == "done"
    assert stepped(group.out) == BOTH_EPOCHS
    assert len(list(group.out.glob("stepped-*.jsonl"))) <= 2


def await_moves(group: Group, instance: int, count: int) -> None:
    """Wait until an instance is known to have moved so many pieces of the state."""
    group.await_members(
        lambda members: any(one["index"] == instance and one.get("moves", 0) >= count for one in members)
    )


@pytest.mark.deep
def test_a_state_that_takes_long_to_be_given_survives(tmp_path: Path, bare: RuntimeSettings) -> None:
    """Live, where no checkpoints are kept: to give it up would be to begin anew."""
    with running_group(tmp_path / "out", bare, instances="1:2", impatient=True, **LARGE, piece_s=0.4) as group:
        group.start(0)
        first = group.await_generation(0)
        group.start(1)
        both = group.await_generation(0, 1, after=first.generation)
        formed = group.await_event("active", lambda event: event.generation == both.generation)
        assert (both.generation, both.gear) == (first.generation + 1, "live"), group.history()
        assert formed.total_s is not None
        assert formed.total_s > 2 * LIMIT_S
        group.await_steps(5)
        group.check_no_step_twice()


@pytest.mark.deep
def test_a_checkpoint_that_takes_long_to_read_is_read_once(tmp_path: Path, settings: RuntimeSettings) -> None:
    """All wait for it, in one generation, whatever its store takes for each answer."""
    with running_group(tmp_path / "out", settings, instances="2", impatient=True, **LARGE) as group:
        group.start(0, 1)
        group.await_generation(0, 1)
        group.await_steps(5)
        group.terminate(0)
        group.terminate(1)
        assert group.statuses() == {0: -15, 1: -15}
        group.agents.clear()
        before = max(event.generation for event in group.events())

        group.option(**LARGE, piece_s=0.3)
        group.start(0, 1)
        again = group.await_generation(0, 1, after=before)
        formed = group.await_event("active", lambda event: event.generation == again.generation)
        assert formed.total_s is not None
        assert formed.total_s > 2 * LIMIT_S
        group.await_steps(5)
        assert again.generation == before + 1, group.history()
        assert sum(group.log(instance).count("checkpoint.loaded") for instance in (0, 1)) == 1
        group.check_no_step_twice()


@pytest.mark.deep
def test_who_ends_a_long_step_is_waited_for(tmp_path: Path, bare: RuntimeSettings) -> None:
    """It has the state, and all the while it computes."""
    with running_group(tmp_path / "out", bare, instances="1:2", impatient=True, **LARGE, gates=[5]) as group:
        group.start(0)
        first = group.await_generation(0)
        group.await_steps(4)
        group.start(1)
        group.await_event("forming", lambda event: event.generation > first.generation)
        time.sleep(1.5 * LIMIT_S)
        assert group.events()[-1].kind == "forming", group.history()
        open_gate(group.out, 5)
        both = group.await_generation(0, 1, after=first.generation)
        assert (both.generation, both.gear) == (first.generation + 1, "live")
        group.await_steps(5)
        group.check_no_step_twice()


@pytest.mark.deep
@pytest.mark.parametrize("stops", ["the giver", "the taker"])
def test_a_trainer_that_stops_while_the_state_moves_is_replaced(
    tmp_path: Path, bare: RuntimeSettings, stops: str
) -> None:
    """As at the end of a step; nobody else waits than who is at its other end, and keeps or finds the state."""
    with running_group(tmp_path / "out", bare, instances="2:3", **LARGE, piece_s=0.2) as group:
        group.start(0, 1)
        first = group.await_generation(0, 1)
        group.start(2)
        joining = group.await_event("forming", lambda event: 2 in event.members)
        await_moves(group, 2, 5)
        victim = first.members[0] if stops == "the giver" else 2
        group.trainer(victim).suspend()
        stopped = group.await_event("failed", lambda event: event.instance == victim)
        assert "is stopped" in stopped.reason
        after = group.await_generation(*{0, 1, 2} - {victim}, after=joining.generation)
        assert (after.generation, after.gear) == (joining.generation + 1, "live")
        group.await_steps(5)
        group.check_no_step_twice(killed=int(stops == "the giver"))
