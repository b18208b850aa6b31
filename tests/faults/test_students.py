"""Students that fork, spawn, forget their reader, are interrupted and killed."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from support.students.process import student, until_it_says
from support.students.readers import POOL, Batches, reader_of, slow_teacher
from support.students.student import COUNT
from support.students.watching import SLACK_S, OddTeacher, tell, together
from support.teachers.process import Teacher, running_teacher, wait_until

from edl_runtime.distill import Fixed
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.server import RedisServer


@pytest.mark.parametrize("story", ["fork", "spawn"])
def test_parent_and_child_read_at_the_same_time(story: str, odd: OddTeacher) -> None:
    """Each its own batches, all of them, in order, by connections that the other does not use."""
    with student(story, odd.address) as process:
        said, errors = process.communicate(timeout=30)
    assert (process.returncode, said.splitlines()[-1:]) == (0, ["right"]), errors
    asked_by_parent = {request.port for request in odd.asked() if request.batch < COUNT}
    asked_by_child = {request.port for request in odd.asked() if request.batch >= COUNT}
    assert asked_by_parent
    assert asked_by_child
    assert not asked_by_parent & asked_by_child


@pytest.mark.slow
def test_a_forked_child_is_a_student_of_its_own(settings: RuntimeSettings) -> None:
    """It registers by itself, with a connection to Redis of its own, and shares the pool with its parent."""
    with (
        together(slow_teacher(settings), slow_teacher(settings)),
        student("fork", POOL, env=settings.to_env()) as process,
    ):
        said, errors = process.communicate(timeout=30)
    assert (process.returncode, said.splitlines()[-1:]) == (0, ["right"]), errors


def test_a_forgotten_reader_disconnects(good: Teacher) -> None:
    """In mid-epoch: its threads end, and its teachers see its connections close."""
    reader = reader_of(Batches(1000, 0.005), Fixed((good.address,)), RuntimeSettings())
    epoch = iter(reader)
    next(epoch)
    assert connections_to(good) == 2
    del epoch, reader
    gc.collect()
    took_s = wait_until(lambda: not any(thread.name.startswith("edl") for thread in threading.enumerate()))
    assert connections_to(good) == 0
    assert took_s < SLACK_S


def connections_to(teacher: Teacher) -> int:
    """How many this process has."""
    port = int(teacher.address.rpartition(":")[2])
    return sum(
        link.status == psutil.CONN_ESTABLISHED and bool(link.raddr) and link.raddr.port == port
        for link in psutil.Process().net_connections()
    )


@pytest.mark.parametrize("behaviour", ["good", "silent"])
def test_ctrl_c_ends_a_student_within_two_seconds(behaviour: str, odd: OddTeacher) -> None:
    """With KeyboardInterrupt, whatever its teachers do."""
    with student("read", odd.address) as process:
        until_it_says(process, "3")
        odd.become(behaviour)
        interrupt(process)


def test_ctrl_c_ends_a_student_whose_source_hangs(good: Teacher) -> None:
    """No thread keeps the process alive."""
    with student("read_a_hanging_source", good.address) as process:
        until_it_says(process, "2")
        interrupt(process)


@pytest.mark.slow
def test_ctrl_c_ends_a_student_whose_redis_is_silent(tmp_path: Path) -> None:
    """It leaves its pool if it can, and does not insist."""
    with RedisServer(tmp_path / "redis") as server:
        settings = RuntimeSettings(redis_url=server.url)
        with slow_teacher(settings), student("read", POOL, env=settings.to_env()) as process:
            until_it_says(process, "3")
            os.kill(server.pid, signal.SIGSTOP)
            interrupt(process)


def interrupt(process: subprocess.Popen[str]) -> None:
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=20)[1]
    took_s = time.monotonic() - begin
    tell(f"ended {took_s:.2f} s after Ctrl-C")
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    assert took_s < 2.0


@pytest.mark.slow
def test_no_teacher_keeps_the_work_of_killed_students() -> None:
    """Of three seconds of work, only what was begun is done before the next student has its answer."""
    begun_s = 0.5
    with (
        running_teacher("support.models:slow", "--max_batch", "1") as teacher,
        contextlib.ExitStack() as stack,
        reader_of(Batches(1), Fixed((teacher.address,)), RuntimeSettings(), teacher_batch_size=8) as reader,
    ):
        processes = [stack.enter_context(student("read_slowly", teacher.address)) for _ in range(3)]
        for process in processes:
            until_it_says(process, "0")  # so each has asked for two things more
        for process in processes:
            process.kill()
        begin = time.monotonic()
        list(reader)
        took_s = time.monotonic() - begin
        tell(f"answered {took_s:.2f} s after the others were killed")
        assert took_s < begun_s + SLACK_S
