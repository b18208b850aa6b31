"""Students and teachers on one machine share memory; where they can't, the socket is used."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from structlog.testing import capture_logs
from support.network.ports import free_ports
from support.teachers.process import Teacher, running_teacher, wait_until
from support.teachers.serving import serving

from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.errors import InferenceError
from edl_runtime.protocol.infer_messages import encode_request
from edl_runtime.protocol.shared_memory import REGISTER_PATH, point_to_region

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is for Linux")

ROWS = np.arange(400_000, dtype=np.float32).reshape(-1, 4)  # 1.6 MB

STUDENT = """
import sys, numpy as np
from edl_runtime.protocol.client import TeacherConnection
with TeacherConnection(sys.argv[1]) as teacher:
    teacher.signature()
    teacher.infer({"x": np.ones((100_000, 4), np.float32)}, ["sum"])
    print(teacher._shared_memory._region is not None, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def arithmetic() -> Iterator[Teacher]:
    with running_teacher("support.models:arithmetic") as teacher:
        yield teacher


def mapped(teacher: Teacher) -> list[str]:
    """Return what the processes of `teacher` have mapped of students' memory, each with its rights."""
    processes = [psutil.Process(teacher.process.pid), teacher.predictor]
    maps = [line for one in processes for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines()]
    return [line.split()[1] for line in maps if "memfd:edl-student" in line]


def held_open(teacher: Teacher) -> int:
    """Return how many descriptors of students' memory the processes of `teacher` hold."""
    processes = [psutil.Process(teacher.process.pid), teacher.predictor]
    count = 0
    for descriptor in [link for one in processes for link in Path(f"/proc/{one.pid}/fd").iterdir()]:
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            count += "memfd:edl-student" in str(descriptor.readlink())
    return count


def shares(connection: TeacherConnection) -> bool:
    return connection._shared_memory._region is not None


def test_answers_are_the_same_as_through_the_socket(arithmetic: Teacher) -> None:
    """Arrays and rows, larger and smaller than the last, in shared memory that the teacher can't write to."""
    with TeacherConnection(arithmetic.address) as shared, TeacherConnection(arithmetic.address) as plain:
        shared.signature()
        for x in (ROWS, list(ROWS[:70_000]), np.tile(ROWS, (3, 1)), ROWS[::-1], ROWS[:5]):
            ours, theirs = (one.infer({"x": x}, ["double", "sum"]) for one in (shared, plain))
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
        assert (shares(shared), shares(plain)) == (True, False)
        assert mapped(arithmetic) == ["r--s"]  # of two regions, for one request was larger than the first
        assert "memfd:edl-student" in Path("/proc/self/maps").read_text()
    assert "memfd:edl-student" not in Path("/proc/self/maps").read_text()
    wait_until(lambda: not mapped(arithmetic) and not held_open(arithmetic))


def test_students_that_share_at_once_get_their_own_answers(arithmetic: Teacher) -> None:
    """Requests that run as one, each from another memory, are not mixed up."""

    def ask(number: int) -> bool:
        x = ROWS + number
        with TeacherConnection(arithmetic.address) as connection:
            connection.signature()
            answers = [connection.infer({"x": x}, ["double"])["double"] for _ in range(10)]
            return shares(connection) and all(np.array_equal(answer, 2 * x) for answer in answers)

    with ThreadPoolExecutor(4) as students:
        assert list(students.map(ask, range(4))) == [True] * 4


def test_a_killed_student_leaves_nothing_behind(arithmetic: Teacher) -> None:
    """The teacher frees a student's memory as soon as its connection ends, for whatever reason."""
    command = [sys.executable, "-c", STUDENT, arithmetic.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as student:
        assert student.stdout is not None
        assert student.stdout.readline() == "True\n"
        wait_until(lambda: mapped(arithmetic) == ["r--s"])  # those of other tests go with their connections
        assert held_open(arithmetic) > 0
        student.kill()
        wait_until(lambda: not mapped(arithmetic) and not held_open(arithmetic))


def test_memory_is_registered_again_with_a_restarted_teacher() -> None:
    """The call in flight fails; the next one connects, registers and shares."""
    rows = ROWS[:20_000]
    (port,) = free_ports(1)
    with serving(port=port) as first:
        connection = TeacherConnection(first.address)
        connection.signature()
        connection.infer({"x": rows}, ["sum"])
    with serving(port=port) as second, connection:
        with pytest.raises(OSError, match=r"."):
            connection.infer({"x": rows}, ["sum"])
        assert not second.front.regions._open
        assert np.array_equal(connection.infer({"x": rows}, ["sum"])["sum"], rows.sum(axis=1))
        assert shares(connection)
        assert len(second.front.regions._open) == 1


def refuse(*_: object) -> int:
    raise OSError("no such call")


@pytest.mark.parametrize(
    ("call", "does", "cause"),
    [
        ("getpid", lambda: 2**22 + 1, "can't open shared memory"),  # Linux has no such process
        ("memfd_create", refuse, "no such call"),
    ],
    ids=["a teacher that can't find the memory, as behind a tunnel", "a system that makes none"],
)
def test_a_student_that_can_not_share_uses_the_socket(
    arithmetic: Teacher, monkeypatch: pytest.MonkeyPatch, call: str, does: Callable[..., int], cause: str
) -> None:
    """It is answered all the same, and that is logged once."""
    with monkeypatch.context() as patch, TeacherConnection(arithmetic.address) as connection, capture_logs() as logs:
        patch.setattr(f"edl_runtime.protocol.shared_memory.os.{call}", does)
        connection.signature()
        for _ in range(2):
            assert np.array_equal(connection.infer({"x": ROWS}, ["double"])["double"], 2 * ROWS)
        assert not shares(connection)
    assert [log["event"] for log in logs] == ["teacher.memory_not_shared"]
    assert cause in logs[0]["cause"]


def test_a_registration_needs_the_token_and_is_checked() -> None:
    """Without the token nothing is opened; an invalid registration is refused and the connection stays."""
    with serving(token="secret") as served:
        for token, body, status, said in (
            ("", b'{"pid": 1, "fd": 0, "secret": ""}', 401, "token"),
            ("secret", b'{"key": "/etc/passwd"}', 400, "not a registration"),
            ("secret", b" " * 5000, 413, "allowed are 4096"),
        ):
            with TeacherConnection(served.address, token=token) as connection:
                with pytest.raises(InferenceError, match=said) as refused, connection._link as stream:
                    connection._register(stream, body)
                assert refused.value.status == status
                assert connection.ready()
    assert REGISTER_PATH.startswith("/v2/systemsharedmemory/")


def test_a_client_can_not_read_anothers_region() -> None:
    """Not even in the slot in which the other was served."""
    rows = ROWS[:20_000]
    with serving(slots=1) as served, TeacherConnection(served.address) as owner:
        owner.signature()
        owner.infer({"x": rows}, ["sum"])
        assert shares(owner)
        header = point_to_region(encode_request({"x": rows}, ["sum"]).header)
        with TeacherConnection(served.address) as other:
            with pytest.raises(InferenceError, match="not registered through this connection") as refused:
                other._exchange(header, [], len(header))
            assert refused.value.status == 400


def test_a_failure_of_the_model_does_not_end_sharing() -> None:
    """It is raised; only what may be about the memory itself is asked again through the socket."""
    with serving("fragile") as served, TeacherConnection(served.address) as connection:
        connection.signature()
        with pytest.raises(InferenceError, match="one is too many") as refused:
            connection.infer({"x": np.ones((20_000, 4), np.float32)}, [])
        assert refused.value.status == 500
        assert shares(connection)
