"""`edl teacher` as a process: it registers, drains, and leaves nothing behind however it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import redis
from structlog.testing import capture_logs
from support.paths import TESTS
from support.teachers.process import PATIENCE_S, Teacher, is_gone, running_teacher, starting_teacher, wait_until

from edl_runtime.errors import EX_CONFIG
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.errors import InferenceError
from edl_runtime.protocol.infer_messages import encode_request
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys, redis_client
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import ANSWER_TIMEOUT_S, connect
from edl_runtime.store.redis_server import RedisServer
from edl_runtime.teacher import service
from edl_runtime.teacher.metrics import TeacherMetrics
from edl_runtime.teacher.models.model import ModelOptions
from edl_runtime.teacher.predictor import pool
from edl_runtime.teacher.service import DRAIN_S
from edl_runtime.teacher.shm.arena import Arena

X = np.ones((1, 4), np.float32)


async def members(redis_url: str, namespace: str) -> list[Member]:
    async with connect(redis_url) as redis_client:
        return await Directory(redis_client, namespace).members("pool")


async def joined(redis_url: str, namespace: str) -> list[Member]:
    """Wait for the teacher to be in its list: it is ready right before."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := await members(redis_url, namespace)):  # noqa: ASYNC110 - it is another process that joins
            await asyncio.sleep(0.01)
    return found


def ended(*flags: str, model: str = "support.models:arithmetic", **env: str) -> tuple[int, str]:
    """Run a teacher that is to end by itself; return its exit status and its output."""
    with starting_teacher(model, *flags, env=env) as process:
        _, said = process.communicate(timeout=2 * PATIENCE_S)
    return process.returncode, said


@pytest.fixture(scope="module")
def arithmetic() -> Iterator[Teacher]:
    """A teacher for those that only ask."""
    with running_teacher("support.models:arithmetic") as teacher:
        yield teacher


def test_a_damaged_model_ends_its_teacher_before_a_predictor_is_started(tmp_path: Path) -> None:
    """With the file's name as its last word, which is the first that a task says."""
    (tmp_path / "net.json").write_text("garbage")
    (tmp_path / "net.pdiparams").write_bytes(b"")
    status, said = ended(model=str(tmp_path), PYTHONPROFILEIMPORTTIME="1")
    assert status == EX_CONFIG
    assert said.splitlines()[-1].startswith(f"edl: model '{tmp_path}': net.json is damaged: ")
    assert " paddle.inference" not in said


def test_a_teacher_without_a_pool_needs_no_redis() -> None:
    """A fixed teacher serves under the name and with the requested outputs, and ends on SIGTERM with 0."""
    flags = ("--name", "doubler", "--outputs", "twice=double")
    with running_teacher("support.models:arithmetic", *flags) as teacher:
        with TeacherConnection(teacher.address, model="doubler") as connection:
            assert [spec.name for spec in connection.signature().outputs] == ["twice"]
            assert np.array_equal(connection.infer({"x": X}, ["twice"])["twice"], X * 2)
        predictor = teacher.predictor
        teacher.terminate()
        assert teacher.process.wait(PATIENCE_S) == 0
        assert is_gone(predictor)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux tells of the timers of connections")
def test_a_client_whose_machine_is_gone_is_noticed(arithmetic: Teacher) -> None:
    """An idle connection is probed: without an answer it does not count for ever."""
    with TeacherConnection(arithmetic.address) as connection:
        assert connection.ready()
        port = f"{int(arithmetic.address.rpartition(':')[2]):04X}"

        def timers() -> list[str]:
            lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            found = [
                timer for _, local, _, state, _, timer, *_ in lines if local.endswith(f":{port}") and state == "01"
            ]
            return [timer[:2] for timer in found]

        wait_until(lambda: timers() == ["02"])  # keep-alive, once the client's machine has its answer


def test_two_predictors_share_the_work(tmp_path: Path) -> None:
    """One process a device: while one is busy, the other answers."""
    env = {"HELD_MODEL_FOLDER": str(tmp_path)}
    with (
        running_teacher("support.models:held", "--gpu-ids", "0,1", env=env) as teacher,
        TeacherConnection(teacher.address) as one,
        TeacherConnection(teacher.address) as other,
        ThreadPoolExecutor(1) as thread,
    ):
        assert len(psutil.Process(teacher.process.pid).children()) == 2
        held = thread.submit(one.infer, {"x": X}, [])
        try:
            wait_until((tmp_path / "begun").exists)
            for _ in range(5):
                other.infer({"x": X * 0}, [])
            assert not held.done()
        finally:
            (tmp_path / "go").touch()
        assert np.array_equal(held.result(PATIENCE_S)["double"], X * 2)


async def test_a_teacher_is_in_its_pool_from_ready_to_sigterm(redis_url: str, namespace: str, tmp_path: Path) -> None:
    """It registers once it answers; it leaves the list first, answers what is in flight, refuses the rest, exits."""
    env = {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace, "HELD_MODEL_FOLDER": str(tmp_path)}
    with running_teacher("support.models:held", "--pool", "pool", "--weight", "2", env=env) as teacher:
        found = await joined(redis_url, namespace)
        assert [(one.address, one.weight) for one in found] == [(teacher.address, 2.0)]
        predictor = teacher.predictor
        with (
            TeacherConnection(teacher.address) as early,
            TeacherConnection(teacher.address) as late,
            ThreadPoolExecutor(1) as thread,
        ):
            assert found[0].signature == late.signature()
            answer = thread.submit(early.infer, {"x": X}, [])
            wait_until((tmp_path / "begun").exists)
            predictor.terminate()  # a group of processes is often signalled as one
            teacher.terminate()
            wait_until(lambda: not late.ready())
            assert await members(redis_url, namespace) == []
            assert not answer.done()
            with pytest.raises(InferenceError) as refused:
                late.infer({"x": X}, [])
            assert (refused.value.status, refused.value.retryable) == (503, True)
            (tmp_path / "go").touch()
            assert np.array_equal(answer.result(PATIENCE_S)["double"], X * 2)
        assert teacher.process.wait(PATIENCE_S) == 0
        assert is_gone(predictor)


def test_the_predictor_dies_with_a_killed_front(tmp_path: Path) -> None:
    """SIGKILL of the server leaves no process, even in the middle of a run; their memory has no name to leak by."""
    with (
        running_teacher("support.models:held", env={"HELD_MODEL_FOLDER": str(tmp_path)}) as teacher,
        TeacherConnection(teacher.address) as connection,
        ThreadPoolExecutor(1) as thread,
    ):
        predictor = teacher.predictor
        answer = thread.submit(connection.infer, {"x": X}, [])
        wait_until((tmp_path / "begun").exists)
        teacher.process.kill()
        assert isinstance(answer.exception(PATIENCE_S), OSError)
        wait_until(lambda: is_gone(predictor))


async def test_a_teacher_whose_predictor_died_leaves(redis_url: str, namespace: str) -> None:
    """Requests in flight get an error that another teacher may not have; the teacher leaves the list and fails."""
    env = {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace, "EDL_POOL": "pool"}
    with running_teacher("support.models:fragile", env=env) as teacher:
        await joined(redis_url, namespace)
        with TeacherConnection(teacher.address) as connection:
            with pytest.raises(InferenceError, match="which may be the cause") as refused:
                connection.infer({"x": X * 2}, [], alone=True)
            assert (refused.value.retryable, refused.value.predictor_died) == (True, True)
        assert teacher.process.wait(PATIENCE_S) == 1
        assert "edl: the predictor was killed by SIGKILL" in teacher.process.communicate()[1]
        assert await members(redis_url, namespace) == []


async def test_a_predictor_that_can_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that works no more but does not end either, for a thread of the model, keeps no teacher waiting."""
    monkeypatch.setattr(pool, "END_WITHIN_S", 0.2)
    monkeypatch.chdir(TESTS)  # where the predictor finds its model
    arena = Arena.create(1 << 16)
    lingering = [ModelOptions(model="support.models:lingering")]
    others = set(psutil.Process().children())
    with capture_logs() as logs:
        async with pool.run_predictors(lingering, arena, TeacherMetrics()) as running:
            [process] = set(psutil.Process().children()) - others
            header, buffers, size, _ = encode_request({"x": X}, [])
            arena.request(0)[:size] = header + b"".join(part.tobytes() for part in buffers)
            running.submit(0, size, len(header), lambda _: None)
            error = await asyncio.wait_for(running.failed(3600.0), PATIENCE_S)
            assert "the predictor was killed by SIGKILL" in str(error)
            assert is_gone(process)
    assert "predictor.killed" in [log["event"] for log in logs]
    arena.close()


@pytest.mark.slow
async def test_a_teacher_whose_predictor_hangs_leaves(redis_url: str, namespace: str) -> None:
    """Within the limit it is off the list, its requests are another teacher's, and it exits 1."""
    env = {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace, "EDL_POOL": "pool"}
    with (
        running_teacher("support.models:arithmetic", "--hung-after", "2", env=env) as teacher,
        TeacherConnection(teacher.address) as connection,
        ThreadPoolExecutor(1) as thread,
    ):
        await joined(redis_url, namespace)
        predictor = teacher.predictor
        predictor.send_signal(signal.SIGSTOP)
        error = thread.submit(connection.infer, {"x": X}, []).exception(PATIENCE_S)
        assert isinstance(error, InferenceError)
        assert (error.status, error.retryable) == (503, True)
        assert teacher.process.wait(PATIENCE_S) == 1
        assert await members(redis_url, namespace) == []
        assert is_gone(predictor)
        said = teacher.process.communicate()[1]
        assert "edl: the predictor hangs" in said
        assert "Traceback" not in said


def test_a_teacher_that_is_stopped_while_it_loads_ends_quietly() -> None:
    """SIGTERM before it is ready is no failure and leaves no predictor."""
    with starting_teacher("support.models:arithmetic") as process:
        parent = psutil.Process(process.pid)
        wait_until(lambda: len(parent.children()) == 1)
        (predictor,) = parent.children()
        process.terminate()
        _, said = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, said) == (0, "")
        assert is_gone(predictor)


def test_what_a_restart_can_not_mend_exits_with_config() -> None:
    """The error output is the message alone, no traceback."""
    code, said = ended("--outputs", "nothing")
    assert code == EX_CONFIG
    assert said.startswith("edl: ")
    assert "no output 'nothing'; it has double, sum" in said
    assert said.count("\n") == 1


@pytest.mark.slow
async def test_leaving_takes_no_longer_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent Redis and a request that does not end share one time limit, shorter than a backend's grace."""
    limit_s = ANSWER_TIMEOUT_S + 1.0
    monkeypatch.setattr(service, "DRAIN_S", limit_s)
    monkeypatch.setattr(redis_client, "ANSWER_TIMEOUT_S", ANSWER_TIMEOUT_S)
    monkeypatch.setenv("HELD_MODEL_FOLDER", str(tmp_path))
    monkeypatch.chdir(TESTS)  # where the predictor finds its model
    options = service.TeacherOptions(model=ModelOptions(model="support.models:held"), pool="pool")
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with RedisServer(tmp_path) as redis, ThreadPoolExecutor(1) as thread, capture_logs() as logs:
        settings = RuntimeSettings(redis_url=redis.url, lease_ttl_s=3600.0)
        served = asyncio.create_task(
            service.serve(options, settings, lambda found, _: address.set_result(found)), name="teacher"
        )
        await asyncio.wait([served, address], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        with TeacherConnection(address.result() if address.done() else str(await served)) as connection:
            await joined(redis.url, "default")
            answer = thread.submit(connection.infer, {"x": X}, [])
            await asyncio.to_thread(wait_until, (tmp_path / "begun").exists)
            os.kill(redis.pid, signal.SIGSTOP)
            try:
                signal.raise_signal(signal.SIGTERM)
                await asyncio.wait_for(served, PATIENCE_S)
            finally:
                os.kill(redis.pid, signal.SIGCONT)
            refused = await asyncio.to_thread(answer.exception, PATIENCE_S)
            assert isinstance(refused, InferenceError)
            assert (refused.status, refused.retryable) == (503, True)
    [drain] = [log for log in logs if log["event"] == "teacher.not_drained"]
    assert drain["limit_s"] < limit_s - 0.9 * ANSWER_TIMEOUT_S  # Redis had the rest
    assert RuntimeSettings().grace_s - 3 < DRAIN_S < RuntimeSettings().grace_s


def test_a_teacher_serves_on_while_its_keys_hold_something_else(redis_url: str, namespace: str) -> None:
    """It says once which ones, and is back in its pool when they are deleted."""
    env = {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace}
    theirs = keys.service_keys(Service(namespace, "pool"))
    with (
        redis.Redis.from_url(redis_url) as client,
        running_teacher("support.models:arithmetic", "--pool", "pool", env=env) as teacher,
        TeacherConnection(teacher.address) as connection,
    ):
        before = asyncio.run(joined(redis_url, namespace))
        for key in theirs:
            client.pipeline().delete(key).sadd(key, "?").execute()
        assert teacher.process.stderr
        said = next(line for line in teacher.process.stderr if "registry.unavailable" in line)
        assert f"edl:{{{namespace}/pool}}:teachers:" in said
        assert connection.infer({"x": X}, [])
        client.delete(*theirs)
        assert "registry.recovered" in next(line for line in teacher.process.stderr if "registry." in line)
        assert [each.address for each in asyncio.run(joined(redis_url, namespace))] == [before[0].address]


def test_redis_down_at_the_start_may_be_mended_by_a_restart() -> None:
    """The message names the address and not the password; the exit status means that a restart may help."""
    code, said = ended("--pool", "pool", EDL_REDIS_URL="redis://:secret@127.0.0.1:1/0")
    assert code == 1
    assert "Redis at 127.0.0.1:1 can't be used" in said
    assert "secret" not in said
    assert "Traceback" not in said


@pytest.mark.slow
async def test_a_teacher_of_another_model_does_not_join(redis_url: str, namespace: str) -> None:
    """A teacher that differs from its pool names the difference and exits with the status that stops restarts."""
    env = {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace, "EDL_POOL": "pool", "EDL_TEACHER_TOKEN": "t"}
    theirs = ModelSignature(
        name="teacher", inputs=(TensorSpec("x", "FP32", (-1, 4)),), outputs=(TensorSpec("sum", "FP32", (-1,)),)
    )
    member = Member(id="a:1", address="a:1", signature=theirs)
    async with (
        connect(redis_url) as redis_client,
        hold_lease(redis_client, Service(namespace, "pool"), member, ttl_s=12.0),  # for as long the other waits
    ):
        code, said = await asyncio.to_thread(ended, model="support.models:slow", **env)
    assert code == EX_CONFIG
    assert "differs from pool 'pool'" in said
    assert "sum" in said


def test_a_port_in_use_is_named(arithmetic: Teacher) -> None:
    """Two teachers can't have one port; the second names it."""
    port = arithmetic.address.rpartition(":")[2]
    code, said = ended("--port", port)
    assert code == 1
    assert f"can't listen on 127.0.0.1 port {port}" in said


async def test_the_advertised_host_is_the_one_in_the_list(redis_url: str, namespace: str) -> None:
    """Off loopback a token is wanted; the advertised host is one that students can reach, whatever it listens on."""
    env = {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace, "EDL_POOL": "pool", "EDL_TEACHER_TOKEN": "t"}
    with running_teacher("support.models:arithmetic", "--host", "0.0.0.0", "--advertise", "::1", env=env) as teacher:
        assert re.fullmatch(r"\[::1\]:[0-9]+", teacher.address)
        assert [one.address for one in await joined(redis_url, namespace)] == [teacher.address]
        with TeacherConnection(f"127.0.0.1:{teacher.address.rpartition(':')[2]}", token="t") as connection:
            assert connection.signature().name == "teacher"
        assert "EDL_TEACHER_TOKEN" not in teacher.predictor.environ()
