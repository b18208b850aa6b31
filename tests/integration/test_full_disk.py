"""A full disk takes away what is written there, and ends nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.paths import TESTS
from support.teachers.process import PATIENCE_S

from edl_runtime.elastic.rendezvous.group_status import group_status
from edl_runtime.errors import EX_DATAERR
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

FULL = Path("/dev/full")
"""Takes no byte, for want of space."""

ON_SMALL_DISK = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNTING = 'mount -t tmpfs -o size=2m none "$0" && exec "$@"'
"""Mounts a disk of two megabytes at a folder, for the command that follows and what that starts."""


AGENT = (sys.executable, "-m", "edl_runtime.cli", "agent", "--instances", "1:1", "--")


def require_small_disk(folder: Path) -> None:
    try:
        subprocess.run([*ON_SMALL_DISK, MOUNTING, str(folder), "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this system lets nobody but root mount a disk ({error})")


def test_a_local_job_survives_a_full_disk(tmp_path: Path) -> None:
    """It is resized and stopped there, and says what is wrong until there is room again."""
    script = [sys.executable, "-m", "support.backends.full_disk", str(tmp_path)]
    require_small_disk(tmp_path)
    run = subprocess.run(
        [*ON_SMALL_DISK, MOUNTING, str(tmp_path), *script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        timeout=3 * PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr
    full = f"the disk of {tmp_path}/work/jobs/job is full, so this may be out of date"
    assert json.loads(run.stdout) == {
        "submit": f"job 'other' could not be started: OSError: [Errno 28] No space left on device: {tmp_path}/work",
        "resize": "running",
        "full": ["running", 1, full],
        "emptied": ["running", ""],
        "stop": [True, 0],
    }


FILLS_ITS_DISK = """
import pathlib, sys, threading, time

import numpy, paddle

from edl_runtime import elastic
from support.backends.full_disk import fill

disk, room = map(pathlib.Path, sys.argv[1:])


def make_room():
    while not room.exists():
        time.sleep(0.05)
    (disk / "filler").unlink()


run = elastic.init(str(disk / "kept"))
model = paddle.nn.Linear(2, 1)
run.wrap(model, paddle.optimizer.SGD(0.1, parameters=model.parameters()))
for batch in run.data(list(numpy.ones((64, 2), "float32")), global_batch=32):
    loss = model(batch).mean()
    loss.backward()
    run.step(loss=loss)
    if run.step_number == 1:
        fill(disk / "filler")
        threading.Thread(target=make_room, daemon=True).start()
"""


@pytest.mark.slow
def test_a_training_says_that_its_last_checkpoint_finds_no_room(
    tmp_path: Path, environ: dict[str, str], redis_url: str, namespace: str
) -> None:
    """To all who look, for as long as it is tried again; once there is room it succeeds."""
    disk, script, room = tmp_path / "disk", tmp_path / "train.py", tmp_path / "room"
    disk.mkdir()
    script.write_text(FILLS_ITS_DISK)
    require_small_disk(disk)
    agent = subprocess.Popen(
        [*ON_SMALL_DISK, MOUNTING, str(disk), *AGENT, "python", str(script), str(disk), str(room)],
        env={**environ, "PYTHONPATH": str(TESTS), "GLOG_minloglevel": "2"},
    )

    async def waits() -> str:
        async with connect(redis_url) as client:
            while True:
                found = await group_status(client, namespace, "job")
                if found and "checkpoint" in found.waits:
                    return found.waits
                assert agent.poll() is None
                await asyncio.sleep(0.05)

    try:
        told = asyncio.run(asyncio.wait_for(waits(), PATIENCE_S))
        assert told == f"instance 0 waits to write its last checkpoint: no space left in {disk}/kept"
        room.touch()
        assert agent.wait(PATIENCE_S) == 0
    finally:
        agent.kill()
        agent.wait()


@pytest.fixture
def environ(redis_url: str, namespace: str) -> dict[str, str]:
    """What an instance has in its environment."""
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, job="job", pool="pool")
    return {**os.environ, **RuntimeSettings.to_env(settings), "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize("status", [0, EX_DATAERR])
def test_an_agent_that_can_write_no_log_ends_as_its_script(
    tmp_path: Path, environ: dict[str, str], status: int
) -> None:
    """Also where the script's traceback finds no room, and what the agent says in the end."""
    script = tmp_path / "script.py"
    script.write_text(f"if {status}: raise SystemExit({status})")
    command = [*AGENT, "python", str(script)]
    with FULL.open("wb", buffering=0) as full:
        run = subprocess.run(command, env=environ, stdout=full, stderr=full, check=False, timeout=PATIENCE_S)
    assert run.returncode == status


def test_a_teacher_that_can_write_no_log_serves(environ: dict[str, str], redis_url: str, namespace: str) -> None:
    """From its first line on, which says that it is ready, to its last."""

    async def joined() -> str:
        async with connect(redis_url) as client:
            while not (members := await Directory(client, namespace).members("pool")):
                assert teacher.poll() is None
                await asyncio.sleep(0.01)
        return members[0].address

    command = [sys.executable, "-m", "edl_runtime.cli", "teacher", "--model", "support.models:arithmetic"]
    with FULL.open("wb", buffering=0) as full:
        teacher = subprocess.Popen(command, env=environ, stdout=full, stderr=full, cwd=TESTS)
    try:
        address = asyncio.run(asyncio.wait_for(joined(), PATIENCE_S))
        x = np.ones((1, 4), np.float32)
        with TeacherConnection(address, model="teacher") as connection:
            assert np.array_equal(connection.infer({"x": x}, ["double"])["double"], x * 2)
        teacher.terminate()
        assert teacher.wait(PATIENCE_S) == 0
    finally:
        teacher.kill()
        teacher.wait()
