"""Machines that clouds take away after a notice: their trainers and teachers leave before, and all work goes on."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.elastic.agent_group import running_group
from support.elastic.fake_agent import batches_of, open_gate, stepped
from support.metadata_server import MetadataServer, metadata_server
from support.teachers.process import PATIENCE_S, running_teacher, wait_until

from edl_runtime.elastic.rendezvous.requests import request_checkpoint
from edl_runtime.preemption import LATE_S
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def request(settings: RuntimeSettings) -> int:
    async with connect(settings.redis_url) as client:
        return await request_checkpoint(client, settings.namespace, settings.job)


def test_trainers_leave_before_their_machines_are_taken_away(tmp_path: Path, redis_url: str, namespace: str) -> None:
    """One of two leaves live, the last one with a checkpoint; each sample counts once.

    Who has left stays until its machine ends, so that nothing starts it there again, or until the job has ended.
    """
    settings = RuntimeSettings(
        redis_url=redis_url, namespace=namespace, job="training", lease_ttl_s=30.0, checkpoint=str(tmp_path / "kept")
    )

    def on(machine: MetadataServer) -> RuntimeSettings:
        return msgspec.structs.replace(settings, preemption_notice=f"aws={machine.url}")

    options = {"samples": 24000, "global_batch": 24, "epochs": 1, "step_s": 0.2}
    with (
        metadata_server() as first,
        metadata_server() as second,
        running_group(tmp_path / "out", on(first), **options) as group,
    ):
        group.start(0)
        group.settings = on(second)
        group.start(1)
        both = group.await_generation(0, 1)
        group.await_steps(5)

        second.announce(120)
        alone = group.await_generation(0, after=both.generation)
        assert (alone.gear, alone.reason) == ("live", "instance 1 was told to leave")
        note = group.await_event("note", lambda event: event.instance == 1)
        assert note.reason.startswith("AWS announces to terminate this machine in 1")
        group.await_event("left", lambda event: event.instance == 1)
        assert group.agents[1].poll() is None
        group.agents[1].kill()
        group.await_exit(1)
        group.await_steps(5)

        first.announce(120)
        left = group.await_event("left", lambda event: event.instance == 0)
        saved = group.await_event("saved", lambda event: event.at <= left.at)
        assert saved.step == max(each["step"] for each in group.stepped())
        group.settings = settings
        group.start(2)
        group.await_steps(1)
        assert group.agents[0].poll() is None
        (group.out / "quickly").touch()
        assert group.statuses() == {0: 0, 2: 0}, group.history()
        assert stepped(group.out) == batches_of(24000, 24, 1)
        assert not [event for event in group.events() if event.kind in ("failed", "lost", "gone")], group.history()


def test_an_agent_that_was_told_to_end_after_a_notice_does(tmp_path: Path, redis_url: str, namespace: str) -> None:
    """SIGTERM is the machine's end, as far as an instance can know; it may come before or after it has left."""
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, job="training")
    with metadata_server() as machine:
        noticed = msgspec.structs.replace(settings, preemption_notice=f"gcp={machine.url}")
        with running_group(tmp_path / "out", noticed, samples=10**6, step_s=0.05) as group:
            group.start(0)
            group.await_steps(3)
            machine.announce(30)
            group.await_event("left")
            group.terminate(0)
            assert group.await_exit(0) == -15


def test_an_instance_trains_on_a_machine_that_was_spared(tmp_path: Path, redis_url: str, namespace: str) -> None:
    """Its notice is still there. Who left again for it would be started and leave without end, till it is given up."""
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, job="training")
    with metadata_server() as machine:
        machine.announce(-LATE_S - 1)
        noticed = msgspec.structs.replace(settings, preemption_notice=f"aws={machine.url}")
        with running_group(tmp_path / "out", noticed, samples=10**6, step_s=0.05) as group:
            group.start(0)
            group.await_log(0, "preemption.unknown")
            group.await_steps(3)
            machine.announce(120)
            group.await_event("left")
            assert group.agents[0].poll() is None


@pytest.mark.deep
def test_a_notice_while_a_checkpoint_is_written_costs_no_step(tmp_path: Path, redis_url: str, namespace: str) -> None:
    """The checkpoint of the last step is written after it, and the next instance continues there."""
    settings = RuntimeSettings(
        redis_url=redis_url, namespace=namespace, job="training", lease_ttl_s=30.0, checkpoint=str(tmp_path / "kept")
    )
    options = {"samples": 24000, "global_batch": 24, "epochs": 1, "step_s": 0.1}
    with metadata_server() as machine:
        noticed = msgspec.structs.replace(settings, preemption_notice=f"aws={machine.url}")
        with running_group(tmp_path / "out", noticed, gates=["save"], **options) as group:
            group.start(0)
            group.await_steps(3)
            number = asyncio.run(request(settings))
            group.await_members(lambda members: any(each["saving"] == number for each in members))
            machine.announce(120)
            open_gate(group.out, "save")
            left = group.await_event("left")
            saved = group.await_event("saved", lambda event: event.at <= left.at)
            assert saved.step == max(each["step"] for each in group.stepped())
            group.agents[0].kill()
            group.await_exit(0)
            group.settings = settings
            group.start(1)
            (group.out / "quickly").touch()
            assert group.statuses() == {1: 0}, group.history()
        assert stepped(group.out) == batches_of(24000, 24, 1)


@pytest.mark.deep
def test_a_notice_while_a_generation_forms_costs_no_step(tmp_path: Path, redis_url: str, namespace: str) -> None:
    """To the one that joins, as it receives the state: the other trains on, alone."""
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, job="training", lease_ttl_s=30.0)
    options = {"samples": 24000, "global_batch": 24, "epochs": 1, "step_s": 0.1, "hidden": 3000}
    with metadata_server() as machine, running_group(tmp_path / "out", settings, piece_s=0.2, **options) as group:
        group.start(0)
        first = group.await_generation(0)
        group.settings = msgspec.structs.replace(settings, preemption_notice=f"aws={machine.url}")
        group.start(1)
        group.await_event("forming", lambda event: event.generation > first.generation)
        machine.announce(120)
        group.await_event("left", lambda event: event.instance == 1)
        group.await_steps(3)
        assert group.agents[1].poll() is None
        group.agents[1].kill()
        group.await_exit(1)
        (group.out / "quickly").touch()
        assert group.statuses() == {0: 0}, group.history()
        assert stepped(group.out) == batches_of(24000, 24, 1)
        assert not [event for event in group.events() if event.kind in ("failed", "lost", "gone")], group.history()


async def test_a_teacher_leaves_its_pool_before_its_machine_is_taken_away(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    """It answers what it has, and no more; it ends with SIGTERM, which comes later."""
    with metadata_server() as machine:
        environ = {
            "EDL_REDIS_URL": redis_url,
            "EDL_NAMESPACE": namespace,
            "EDL_PREEMPTION_NOTICE": f"azure={machine.url}",
            "HELD_MODEL_FOLDER": str(tmp_path),
        }
        with (
            running_teacher("support.models:held", "--pool", "pool", env=environ) as teacher,
            TeacherConnection(teacher.address) as connection,
            ThreadPoolExecutor(1) as thread,
        ):
            async with connect(redis_url) as client, asyncio.timeout(PATIENCE_S):
                directory = Directory(client, namespace)
                while not await directory.members("pool"):  # noqa: ASYNC110 - it is another process that joins
                    await asyncio.sleep(0.01)
                held = thread.submit(connection.infer, {"x": np.ones((1, 4), np.float32)}, [])
                await asyncio.to_thread(wait_until, (tmp_path / "begun").exists)
                machine.announce(60)
                while await directory.members("pool"):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)
            assert not held.done()
            (tmp_path / "go").touch()
            assert np.array_equal(held.result(PATIENCE_S)["double"], 2 * np.ones((1, 4), np.float32))
            assert teacher.process.poll() is None
            teacher.terminate()
            assert teacher.process.wait(PATIENCE_S) == 0
