"""Agents and trainers, all real: instances come, go, are killed and hang, and the training goes on."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import redis
from support.edl_command import edl_command
from support.elastic.agent_group import Group, running_group
from support.elastic.fake_agent import batches_of, close_gate, open_gate, stepped
from support.paths import TRAINING_SCRIPTS

from edl_runtime.checkpoint.errors import FolderHolder
from edl_runtime.checkpoint.folder_lease import FolderLease
from edl_runtime.checkpoint.storage import storage_at
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.elastic.rendezvous.group_status import GroupStatus, group_status
from edl_runtime.elastic.rendezvous.redis_store import Event
from edl_runtime.elastic.rendezvous.requests import await_checkpoint, request_checkpoint
from edl_runtime.errors import EX_CONFIG, EX_DATAERR
from edl_runtime.progress import Progress, read_progress
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Checkpoint
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = {"samples": 10**6, "global_batch": 24, "epochs": 1, "step_s": 0.05}
"""A training that does not end by itself."""


@pytest.fixture
def settings(redis_url: str, namespace: str, tmp_path: Path) -> RuntimeSettings:
    return RuntimeSettings(
        redis_url=redis_url, namespace=namespace, job="training", lease_ttl_s=30.0, checkpoint=str(tmp_path / "kept")
    )


async def status_of(settings: RuntimeSettings) -> GroupStatus:
    async with connect(settings.redis_url) as client:
        found = await group_status(client, settings.namespace, settings.job)
    assert found is not None
    return found


async def progress_of(settings: RuntimeSettings) -> Progress | None:
    async with connect(settings.redis_url) as client:
        return await read_progress(client, settings.namespace, settings.job)


def check_each_once(group: Group, expected: dict[int, list[int]], *, killed: int) -> None:
    """Check that each step was one on its own samples, in the generation that counts.

    Who is `killed` may have had a part in a step without having written it down.
    """
    found = stepped(group.out)
    assert list(found) == list(expected)
    differing = {step for step, samples in found.items() if samples != expected[step]}
    assert len(differing) <= killed
    for step in differing:
        assert set(found[step]) < set(expected[step])
        assert len(found[step]) == len(set(found[step]))


def test_a_training_survives_what_happens_to_its_instances(tmp_path: Path, settings: RuntimeSettings) -> None:
    """A join, a leave, a killed trainer, a hung one and a killed instance cost pauses, and no sample."""
    options = {"samples": 24000, "global_batch": 24, "epochs": 1, "step_s": 0.2}
    with running_group(tmp_path / "out", settings, **options) as group:
        group.start(0, 1)
        first = group.await_generation(0, 1)
        group.start(2)
        joined = group.await_generation(0, 1, 2, after=first.generation)
        assert (joined.gear, joined.reason) == ("live", "instance 2 has joined")
        group.await_steps(10)

        group.terminate(2)
        left = group.await_generation(0, 1, after=joined.generation)
        group.await_steps(5)
        assert group.await_exit(2) == -15

        group.trainer(1).kill()
        both = group.await_generation(0, 1, after=left.generation)  # before or after one without instance 1
        group.await_steps(5)

        group.trainer(0).suspend()
        hung = group.await_event("failed", lambda event: "is stopped" in event.reason)
        assert hung.instance == 0
        again = group.await_generation(0, 1, after=both.generation)
        group.await_steps(5)

        group.kill(0)
        one = group.await_generation(1, after=again.generation)
        assert one.reason == "instance 0 does not respond"
        group.start(3)
        group.await_generation(1, 3, after=one.generation)
        (group.out / "quickly").touch()
        assert set(group.statuses().values()) == {0}
        assert group.await_event("ended").outcome == "done"
        report = asyncio.run(progress_of(settings))
        assert report is not None
        assert (report.step, report.total_steps) == (1000, 1000)
        assert report.instances == 2
        check_each_once(group, batches_of(24000, 24, 1), killed=3)


def test_a_training_whose_place_another_job_took_goes_on_and_says_so(tmp_path: Path, settings: RuntimeSettings) -> None:
    """It may while Redis has lost the lease. The trainers stay, others may join them, and events name that job."""
    thief = FolderHolder(namespace=settings.namespace, job="thief", since=0.0)
    with running_group(tmp_path / "out", settings, **LONG) as group:
        group.start(0)
        first = group.await_generation(0)
        group.await_steps(3)
        leases, holder, _ = keys.checkpoint_lease(storage_at(settings.checkpoint).identity())
        with redis.Redis.from_url(settings.redis_url) as client:
            assert client.zcard(leases) == 1
            client.hset(holder, mapping={"job": "thief", "about": msgspec.json.encode(thief)})
            group.await_event("note", lambda event: "job 'thief'" in event.reason and "lost" in event.reason)
            client.zadd(leases, {"thief": 2**53})
        group.await_steps(3)
        group.start(1)
        with redis.Redis.from_url(settings.redis_url) as client:
            group.await_condition(lambda: _renewed(client, leases) or _refused(group), "instance 1 says so")
        joined = group.await_generation(0, 1, after=first.generation)
        group.await_steps(3)
        assert joined.gear == "live"


def _renewed(client: redis.Redis, leases: str) -> None:
    """Be the other job, which lives."""
    client.zincrby(leases, 2, "thief")


def _refused(group: Group) -> bool:
    return any(event.instance == 1 and "continues" in event.reason for event in group.events() if event.kind == "note")


FORGETS = """
import helper
from edl_runtime import elastic
helper.train()
"""


def test_a_script_that_runs_in_two_instances_and_calls_no_init_is_told_of(
    tmp_path: Path, settings: RuntimeSettings
) -> None:
    """While it runs, and not only as it ends: by an event, and in the log of one of them."""
    (tmp_path / "helper.py").write_text("import time\ndef train():\n    time.sleep(600)")
    (tmp_path / "train.py").write_text(FORGETS)
    with running_group(tmp_path / "out", settings, instances="2:2", command=[str(tmp_path / "train.py")]) as group:
        group.start(0, 1)
        told = group.await_event("waiting", lambda event: "never calls elastic.init" in event.reason)
        group.await_condition(lambda: "job.blocked" in group.log(0) + group.log(1), "the log says so")
        assert (group.log(0) + group.log(1)).count(told.reason) == 1


@pytest.mark.parametrize("instances", [1, 2])
def test_a_training_of_nan_is_not_green(tmp_path: Path, settings: RuntimeSettings, instances: int) -> None:
    """An event and the log of rank 0 say since which step, once. The next run goes back before it, and may fail."""
    options = {"samples": 240, "global_batch": 24, "epochs": 1}  # ten steps
    settings = msgspec.structs.replace(settings, checkpoint_every_steps=4, result_file=str(tmp_path / "result.json"))
    members = range(instances)
    with running_group(tmp_path / "first", settings, instances=f"{instances}:{instances}") as group:
        group.option(**options, nan_at=6)
        group.start(*members)
        assert group.statuses() == dict.fromkeys(members, 0)
        told = [event.reason for event in group.events() if event.kind == "note"]
        logs = [group.log(instance) for instance in members]
    store = CheckpointStore(Checkpoint(url=settings.checkpoint))
    last, *_, finite = store.list()
    marked = {info.manifest.step: bool(info.manifest.not_finite) for info in store.list()}
    assert marked[4] is False
    assert marked[10] is True
    assert told[0] == (
        "NaN or infinity in the loss and the gradients of step 6: training continues, and checkpoints with such "
        "weights are marked"
    )
    assert len([text for text in told if "of step" in text]) == 1
    assert sorted(log.count("step.not_finite") for log in logs) == [0] * (instances - 1) + [1]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["checkpoint"], result["not_finite"]) == (last.url, {"loss": 6, "gradients": 6})

    settings = msgspec.structs.replace(settings, not_finite="fail")
    with running_group(tmp_path / "second", settings, instances=f"{instances}:{instances}") as group:
        group.option(**options, nan_at=7)
        group.start(*members)
        statuses = group.statuses()
        assert EX_DATAERR in statuses.values()
        assert 0 not in statuses.values()
        told = [event.reason for event in group.events() if event.kind == "note"]
        assert "NaN or infinity in the loss and the gradients of step 7: the job fails" in told
        passed = f"training goes back to step 4: checkpoint {last.url} is not finite"
        assert any(text.startswith(passed) for text in told)
        logs = [group.log(instance) for instance in members]
        assert [log.count("worker.started") for log in logs] == [1] * instances, "\n".join(logs)
        assert any("of step 7, which is not applied; the checkpoints before it stay" in log for log in logs)
    assert finite.manifest.step == 4
    assert store.load(finite).step == 4


ELASTIC_PLACE = """
import sys
from edl_runtime import elastic
import paddle

run = elastic.init(sys.argv[1])
model = paddle.nn.Linear(2, 1)
run.wrap(model, paddle.optimizer.SGD(0.1, parameters=model.parameters()))
print("trains", flush=True)
"""


async def test_a_script_that_names_another_jobs_place_by_itself_fails_before_it_trains(
    tmp_path: Path, settings: RuntimeSettings
) -> None:
    """The agent does not know the place before the script says it; starting the job again is pointless."""
    (tmp_path / "train.py").write_text(ELASTIC_PLACE)
    own = msgspec.structs.replace(settings, checkpoint="")
    nightly = msgspec.structs.replace(settings, job="nightly")
    async with connect(settings.redis_url) as client:
        lease = FolderLease(client, nightly, str(tmp_path / "kept"))
        await lease.take()
        keeping = asyncio.create_task(lease.keep(print))
        command = [str(tmp_path / "train.py"), str(tmp_path / "kept")]
        with running_group(tmp_path / "out", own, instances="1:1", command=command) as group:
            group.start(0)
            assert await asyncio.to_thread(group.statuses) == {0: EX_DATAERR}
            log = group.log(0)
        assert "edl: instance 0: job 'nightly'" in log
        assert "trains" not in log
        keeping.cancel()
        await asyncio.wait([keeping])


WARM = {"samples": 60000, "global_batch": 24, "epochs": 1, "step_s": 0.05}


def test_a_training_without_live_generations_goes_on_from_checkpoints(
    tmp_path: Path, settings: RuntimeSettings
) -> None:
    """In warm gear one trainer leaves with a checkpoint and standbys take over; all leaving ends with one, too."""
    with running_group(tmp_path / "out", settings, gear="warm", **WARM) as group:
        group.start(0, 1)
        first = group.await_generation(0, 1)
        group.await_standbys()
        leaver, stays = first.members
        group.terminate(leaver)
        second = group.await_generation(stays, after=first.generation)
        assert second.gear == "warm"
        group.await_steps(5)
        assert group.await_exit(leaver) == -15
        group.terminate(stays)
        assert group.statuses() == {stays: -15}
        saved = group.await_event("saved", lambda event: event.generation >= second.generation)
        assert saved.step == max(each["step"] for each in group.stepped())
        group.check_no_step_twice()


@pytest.mark.deep
def test_standbys_take_over_when_rank_0_is_lost(tmp_path: Path, settings: RuntimeSettings) -> None:
    """Who joined last has the state as well; no step is done twice."""
    with running_group(tmp_path / "out", settings, gear="warm", **WARM) as group:
        group.start(0)
        first = group.await_generation(0)
        group.start(1)
        both = group.await_generation(0, 1, after=first.generation)
        assert (both.gear, both.members) == ("warm", (0, 1))
        group.await_steps(5)
        group.trainer(0).kill()
        alone = group.await_generation(1, after=both.generation)
        group.await_generation(0, 1, after=alone.generation)
        group.await_steps(5)
        group.terminate(0)
        group.terminate(1)
        assert group.statuses() == {0: -15, 1: -15}
        group.check_no_step_twice(killed=1)


@pytest.mark.deep
def test_a_trainer_that_does_not_come_back_from_a_step_is_replaced(tmp_path: Path, settings: RuntimeSettings) -> None:
    """It says all the time that it lives, so that only a limit to what a step may take tells it from a slow one."""
    limited = msgspec.structs.replace(settings, step_limit_s=2.0)
    with running_group(tmp_path / "out", limited, instances="1:2", **LONG) as group:
        group.start(0)
        first = group.await_generation(0)
        group.option(**LONG, stuck_after=5)
        group.start(1)
        both = group.await_generation(0, 1, after=first.generation)
        stuck = group.await_event("failed")
        assert stuck.instance == 1
        assert "all others have waited 2 s for it at the end of a step" in stuck.reason
        group.await_generation(0, 1, after=both.generation + 1)
        group.await_steps(5)


INDIRECT = TRAINING_SCRIPTS / "indirect_script.py"


def test_instances_may_find_out_at_the_same_time_that_their_script_is_elastic(
    tmp_path: Path, settings: RuntimeSettings
) -> None:
    """None of them has begun to train, so nothing is lost by it."""
    out = tmp_path / "out"
    command = [sys.executable, str(INDIRECT), str(out)]
    with running_group(out, settings, instances="2", command=command, samples=960, global_batch=24, epochs=1) as group:
        group.start(0, 1)
        assert group.statuses() == {0: 0, 1: 0}, group.history()
        check_each_once(group, batches_of(960, 24, 1), killed=0)
        assert {each["rank"] for each in group.stepped()} == {0, 1}
        assert not [event for event in group.events() if event.kind == "failed"], group.history()


PLAIN = TRAINING_SCRIPTS / "plain_script.py"


def test_an_unchanged_script_trains_as_two_instances(
    tmp_path: Path, settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script of paddle.DataParallel that knows nothing of this project has its ranks and its peers.

    Its Paddle has no CUDA, so it makes no difference that the machine seems to have a GPU.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    out = tmp_path / "out"
    command = [sys.executable, str(PLAIN), str(out)]
    with running_group(out, settings, instances="2", command=command) as group:
        group.start(0, 1)
        assert group.statuses() == {0: 0, 1: 0}
        weights = {file.name: file.read_text() for file in out.glob("rank-*")}
        assert set(weights) == {"rank-0-of-2", "rank-1-of-2"}
        assert len(set(weights.values())) == 1


TORCH = TRAINING_SCRIPTS / "torch_script.py"
TORCH_PYTHON = os.environ.get("EDL_TORCH_PYTHON") or (importlib.util.find_spec("torch") and sys.executable)


@pytest.mark.deep
@pytest.mark.skipif(not TORCH_PYTHON, reason="no PyTorch here, and EDL_TORCH_PYTHON names no interpreter that has it")
def test_an_unchanged_script_of_pytorch_goes_on_from_its_own_checkpoints(
    tmp_path: Path, settings: RuntimeSettings
) -> None:
    """One that knows nothing of this project is started anew when another instance joins, with its rank and peers."""
    out = tmp_path / "out"
    with running_group(out, settings, instances="1:2", command=[str(TORCH_PYTHON), str(TORCH), str(out)]) as group:
        group.start(0)
        alone = group.await_generation(0)
        group.await_log(0, "rank 0 of 1 resumes from step 0")
        group.start(1)
        group.await_generation(0, 1, after=alone.generation)
        assert group.statuses() == {0: 0, 1: 0}, group.history()
        begun = group.await_log(0, "rank 0 of 2 resumes from step ")
        assert int(begun.split()[0]) > 0
        weights = {file.name: file.read_text() for file in out.glob("rank-*")}
        assert set(weights) == {"rank-0-of-2", "rank-1-of-2"}
        assert len(set(weights.values())) == 1
        assert not [event for event in group.events() if event.kind == "failed"], group.history()


def test_an_agent_says_what_it_lacks(tmp_path: Path) -> None:
    """Without Redis or a job's name there is nothing to agree on."""

    def said(**environ: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "edl_runtime.cli", "agent", "--instances", "1:2", "--", "train.py"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environ)
        return ran.returncode, ran.stderr

    url = "redis://127.0.0.1:1/0"
    for environ, missing in (
        ({}, "EDL_REDIS_URL"),
        ({"EDL_REDIS_URL": url}, "EDL_JOB"),
        ({"EDL_REDIS_URL": url, "EDL_JOB": "training"}, "train.py"),
    ):
        status, words = said(**environ)
        assert status == 78
        assert missing in words


def test_an_agent_that_can_not_read_its_group_ends_before_it_trains(tmp_path: Path, settings: RuntimeSettings) -> None:
    """A training that runs goes on; one that starts says which keys, and nothing waits for ever."""
    with running_group(tmp_path / "out", settings, instances="1") as group:
        with redis.Redis.from_url(settings.redis_url) as client:
            client.set(keys.group_state(settings.namespace, settings.job), "?")
        group.start(0)
        assert group.await_exit(0) == 1
        assert f"the record in Redis at 'edl:{{{settings.namespace}/training}}:group:" in group.log(0)


def answers(settings: RuntimeSettings, number: int) -> list[int]:
    """Return the steps of the checkpoints that answer this request."""
    found = CheckpointStore(Checkpoint(url=settings.checkpoint)).list()
    return [info.manifest.step for info in found if info.manifest.request == number]


def request(settings: RuntimeSettings) -> int:
    async def ask() -> int:
        async with connect(settings.redis_url) as client:
            return await request_checkpoint(client, settings.namespace, settings.job)

    return asyncio.run(ask())


def answer(settings: RuntimeSettings, number: int) -> Event:
    async def wait() -> Event:
        async with connect(settings.redis_url) as client:
            return await await_checkpoint(client, settings.namespace, settings.job, number)

    return asyncio.run(wait())


@pytest.mark.deep
@pytest.mark.parametrize("gear", ["live", "warm"])
def test_rank_0_answers_a_request_as_it_leaves(tmp_path: Path, settings: RuntimeSettings, gear: str) -> None:
    """The next rank 0 waits for it, also where it takes over from a checkpoint that is written as the other leaves."""
    lasting = msgspec.structs.replace(settings, checkpoint_keep_last=100)
    with running_group(tmp_path / "out", lasting, gear=gear, gates=["save"], **LONG) as group:
        group.start(0, 1)
        first = group.await_generation(0, 1)
        group.await_standbys()
        number = request(settings)
        leaver, stays = first.members
        group.await_members(lambda members: any(each["saving"] == number for each in members))
        group.terminate(leaver)
        open_gate(group.out, "save")
        assert answer(settings, number).instance == leaver
        group.await_generation(stays, after=first.generation)
        group.await_steps(5)
        assert len(answers(settings, number)) == 1
        assert [event.request for event in group.events() if event.kind == "saved"].count(number) == 1


def test_each_request_for_a_checkpoint_gets_one(
    tmp_path: Path, settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it trains, while another instance joins, and when the agent and trainer that write it are killed."""
    lasting = msgspec.structs.replace(settings, checkpoint_keep_last=100)
    with running_group(tmp_path / "out", lasting, gates=["save"], **LONG) as group:
        open_gate(group.out, "save")
        group.start(0, 1)
        first = group.await_generation(0, 1)
        group.await_steps(2)
        with edl_command(monkeypatch, capsys, "checkpoints", "request") as edl:
            for name, value in lasting.to_env().items():
                monkeypatch.setenv(name, value)
            code, printed, _ = edl(settings.job, "--json")
        assert code == 0
        shown = json.loads(printed)
        group.start(2)
        joining = request(settings)
        joined = group.await_generation(0, 1, 2, after=first.generation)
        assert answer(settings, joining).step > shown["step"]
        close_gate(group.out, "save")
        killed = request(settings)
        group.await_members(lambda members: any(each["saving"] == killed for each in members))
        writer, *others = joined.members
        group.kill(writer)
        open_gate(group.out, "save")
        after = answer(settings, killed)
        assert after.instance in others
        assert len(answers(settings, joining)) == 1
        assert answers(settings, killed) == [after.step]
        saved = [event for event in group.events() if event.kind == "saved"]
        assert len(saved) == 3, group.history()
        assert {shown["url"], after.url} < {event.url for event in saved}


def test_a_straggler_is_named_and_started_again_where_that_is_asked_for(
    tmp_path: Path, settings: RuntimeSettings
) -> None:
    """Once a day here, so that it is only named when it is as slow again. The others are none, and train on."""
    slow = msgspec.structs.replace(settings, straggler_after_s=2.0, straggler_restarts=1)
    with running_group(tmp_path / "out", slow, **LONG) as group:
        group.start(0, 1)
        group.option(**{**LONG, "step_s": 0.3})
        group.start(2)
        together = group.await_generation(0, 1, 2)
        named = group.await_event("straggler")
        assert named.instance == 2
        assert re.match(r"\d\.\d times slower than its peers for 2 s: it computes 0\.\d+ s in a step", named.reason)
        assert named.reason.endswith("; it leaves, to be started again")
        group.await_generation(0, 1, after=together.generation)
        assert group.await_exit(2) == -15

        group.start(2)
        again = group.await_event("straggler", lambda event: event.id > named.id)
        assert (again.instance, again.reason.count("started again")) == (2, 0)
        told = asyncio.run(status_of(settings))
        assert set(told.stragglers) == {2}
        assert told.stragglers[2] > 1.5
        group.await_steps(20)
        assert group.agents[2].poll() is None
        assert [event.instance for event in group.events() if event.kind == "straggler"] == [2, 2]


DUPLICATE = "(External) NCCL error(5), invalid usage. Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 10"


@pytest.mark.parametrize("error", [pytest.param(None, marks=pytest.mark.deep), DUPLICATE])
def test_instances_on_gpus_train_together_or_the_newcomer_gives_up(
    tmp_path: Path, settings: RuntimeSettings, error: str | None
) -> None:
    """Where they can't form a group, the one that trained before goes on alone, once and for all."""
    out = tmp_path / "out"
    command = [str(TRAINING_SCRIPTS / "gpu_script.py"), str(out)]
    with running_group(out, settings, command=command, **LONG, nccl_error=error) as group:
        group.start(0)
        group.await_generation(0)
        group.await_steps(5)
        group.start(1)
        together = group.await_event("forming", lambda event: event.members == (0, 1)).generation
        if error:
            assert group.await_exit(1) == EX_CONFIG
            group.await_generation(0, after=together)
        else:
            group.await_generation(0, 1)
        group.await_steps(5)
        events = group.events()
        failed = [event.reason for event in events if event.kind == "failed" and event.instance == 1]
        assert len([event for event in events if event.kind == "forming" and event.members == (0, 1)]) == 1
        assert len(failed) == (error is not None)
        assert all(reason.endswith("it gives up, and the others continue") for reason in failed)
        assert all("can't sum gradients with others: (External) NCCL" in reason for reason in failed)
