"""Students that fork, spawn, forget their reader, are interrupted and killed.

That no teacher works for a student that was killed is in tests/integration/test_teacher_queue.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import msgspec
import psutil
import pytest
import redis
from support.paths import TESTS
from support.students.readers import POOL, Batches, FaultyTeacher, read_until, reader_of, registered, slow_teacher
from support.students.student import COUNT
from support.teachers.process import PATIENCE_S, Teacher, wait_until

from edl_runtime.distill import Discovered, Fixed
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_server import RedisServer


@contextlib.contextmanager
def student(
    scenario: str, address: str, env: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[str]]:
    """Start a scenario of `student.py`; it is killed at the end at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "support.students.student", scenario, address],
        cwd=TESTS,
        env={**{name: value for name, value in os.environ.items() if not name.startswith("EDL_")}, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children, too
        process.communicate()


def wait_for_word(process: subprocess.Popen[str], word: str) -> None:
    """Return when that word was in a line that it printed, and fail if it ends before."""
    assert process.stdout is not None
    for line in process.stdout:
        if word in line.split():
            return
    pytest.fail(process.communicate()[1])


@pytest.mark.parametrize("scenario", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_parent_and_child_read_at_the_same_time(
    scenario: str, settings: RuntimeSettings, faulty: FaultyTeacher
) -> None:
    """Each is a student of the pool and has its own batches, all of them, in order, by its own connections."""
    with registered(settings, faulty.address), student(scenario, POOL, env=settings.to_env()) as process:
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output.splitlines()[-1:]) == (0, ["passed"]), errors
    asked_by_parent = {request.port for request in faulty.requests() if request.batch < COUNT}
    asked_by_child = {request.port for request in faulty.requests() if request.batch >= COUNT}
    assert asked_by_parent
    assert asked_by_child
    assert not asked_by_parent & asked_by_child


def test_a_forgotten_reader_disconnects(good: Teacher) -> None:
    """In mid-epoch: its threads end, and its teachers see its connections close."""
    reader = reader_of(Batches(1000, 0.005), Fixed((good.address,)), RuntimeSettings())
    epoch = iter(reader)
    next(epoch)
    wait_until(lambda: connections_to(good) == 2)
    del epoch, reader
    gc.collect()
    wait_until(lambda: not any(thread.name.startswith("edl") for thread in threading.enumerate()))
    assert connections_to(good) == 0


def connections_to(teacher: Teacher) -> int:
    """How many this process has."""
    port = int(teacher.address.rpartition(":")[2])
    return sum(
        link.status == psutil.CONN_ESTABLISHED and bool(link.raddr) and link.raddr.port == port
        for link in psutil.Process().net_connections()
    )


def test_ctrl_c_ends_a_student_whose_teacher_is_silent(faulty: FaultyTeacher) -> None:
    """With KeyboardInterrupt."""
    with student("read", faulty.address) as process:
        wait_for_word(process, "3")
        faulty.set_behaviour("silent")
        interrupt(process)


def test_ctrl_c_ends_a_student_whose_source_hangs(good: Teacher) -> None:
    """No thread keeps the process alive."""
    with student("read_a_hanging_source", good.address) as process:
        wait_for_word(process, "2")
        interrupt(process)


@pytest.mark.slow
def test_ctrl_c_ends_a_student_whose_redis_is_silent(own_redis: RedisServer, good: Teacher) -> None:
    """It leaves its pool if it can, and does not insist."""
    settings = RuntimeSettings(redis_url=own_redis.url)
    with registered(settings, good.address), student("read", POOL, env=settings.to_env()) as process:
        wait_for_word(process, "3")
        os.kill(own_redis.pid, signal.SIGSTOP)
        interrupt(process)
        os.kill(own_redis.pid, signal.SIGCONT)


def interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors.splitlines()[-1]


@pytest.mark.slow
def test_a_killed_student_s_teachers_are_the_others_with_its_lease(
    settings: RuntimeSettings, good: Teacher, faulty: FaultyTeacher
) -> None:
    """Two students share two teachers; nobody has to tell that one is gone."""
    mortal = msgspec.structs.replace(settings, lease_ttl_s=1.0)
    batches = Batches(40, seconds=0.004)
    with (
        registered(settings, good.address, faulty.address),
        student("read", POOL, env=mortal.to_env()) as other,
        reader_of(batches, Discovered(POOL), settings) as reader,
    ):
        wait_for_word(other, "0")
        read_until(reader, batches, lambda: reader.stats().teachers == 1)
        other.kill()
        read_until(reader, batches, lambda: reader.stats().teachers == 2)


@pytest.mark.slow
def test_all_that_a_killed_pool_leaves_in_redis_has_an_end(settings: RuntimeSettings) -> None:
    """Nobody is there to tidy up: what its teachers and students have written goes within a day, and its name."""
    there = {f"{role}:{what}" for role in ("teachers", "students") for what in ("leases", "records", "reports")}
    env = {**settings.to_env(), "EDL_JOB": "job"}
    with redis.Redis.from_url(settings.redis_url, decode_responses=True) as client:

        def ends() -> dict[str, int]:
            found = client.scan_iter(f"edl:{{{settings.namespace}*", count=1000)
            return {key.partition("}:")[2]: client.ttl(key) for key in found}

        with slow_teacher(settings), student("read", POOL, env=env):
            wait_until(lambda: there | {"pools", "progress", "teachers:contract"} <= set(ends()))
        left = ends()
    assert there <= set(left)
    assert {name: end for name, end in left.items() if not 0 < end <= 86_400} == {}
