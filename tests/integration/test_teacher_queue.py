"""What queues at a real teacher while its model is busy: it runs as one, or not at all when nobody waits for it."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.teachers.process import PATIENCE_S, Teacher, running_teacher, wait_until

from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.errors import InferenceError
from edl_runtime.protocol.oip import TopK


def rows(number: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.full((1, 4), number, np.float32)


@contextmanager
def busy_teacher(folder: Path) -> Iterator[Teacher]:
    """A teacher whose model has begun with a request and goes on when `go` is there; it has answered the request."""
    env = {"HELD_MODEL_FOLDER": str(folder)}
    with (
        running_teacher("support.models:held", env=env) as teacher,
        TeacherConnection(teacher.address) as connection,
        ThreadPoolExecutor(1) as thread,
    ):
        held = thread.submit(connection.infer, {"x": rows(1)}, [])
        try:
            wait_until((folder / "begun").exists)
            yield teacher
        finally:
            (folder / "go").touch()
        assert np.array_equal(held.result(PATIENCE_S)["double"], rows(2))


def metrics(teacher: Teacher, token: str = "") -> dict[str, float]:
    """Return what a teacher shows to Prometheus."""
    request = urllib.request.Request(f"http://{teacher.address}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def ran(folder: Path) -> list[list[int]]:
    """Return the first number of each row of each run."""
    return [[int(number) for number in line.split()] for line in (folder / "ran").read_text().splitlines()]


def test_requests_that_queue_run_as_one(tmp_path: Path) -> None:
    """Each gets the answer to what it asked; one that is still on its way to the predictor may run later."""
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(4))
        with busy_teacher(tmp_path) as teacher:
            asking = [stack.enter_context(TeacherConnection(teacher.address)) for _ in range(4)]
            requested: list[str | TopK] = [TopK("double", 1), "double", "double", "double"]
            answers = [
                threads.submit(connection.infer, {"x": rows(number)}, [wish])
                for number, (connection, wish) in enumerate(zip(asking, requested, strict=True), 2)
            ]
            wait_until(lambda: metrics(teacher)["edl_teacher_queue_depth"] == 5)
            (tmp_path / "go").touch()
            found = [answer.result(PATIENCE_S) for answer in answers]
    assert found[0]["double.values"].tolist() == [[4]]
    assert [one["double"][0, 0] for one in found[1:]] == [6, 8, 10]
    others = ran(tmp_path)[1:]
    assert sorted(number for run in others for number in run) == [2, 3, 4, 5]
    assert len(others) < 4


def test_the_work_of_a_student_that_has_gone_does_not_run(tmp_path: Path) -> None:
    """What it had asked for and the teacher had not begun is dropped; those who still wait are served."""
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[7,7,7,7]}]}'
    head = b"POST /v2/models/teacher/infer HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    with busy_teacher(tmp_path) as teacher, TeacherConnection(teacher.address) as watching, ExitStack() as stack:
        assert watching.ready()
        for _ in range(3):
            student = stack.enter_context(socket.create_connection(endpoint_of(teacher.address)))
            student.sendall(head + body)
        wait_until(lambda: metrics(teacher)["edl_teacher_queue_depth"] == 4)
        stack.close()
        wait_until(lambda: metrics(teacher)["edl_teacher_connections"] == 3)  # ours: two, and who asks
        (tmp_path / "go").touch()
        assert np.array_equal(watching.infer({"x": rows(3)}, [])["double"], rows(6))
        counted = metrics(teacher)
        assert counted['edl_teacher_requests_total{status="499"}'] == 3
        assert counted["edl_teacher_queue_depth"] == 0
    assert ran(tmp_path) == [[1], [3]]


def test_what_a_teacher_has_done_is_counted() -> None:
    """Requests by status, the rows of its runs, how busy it was; on all hosts, with the token only."""
    with (
        running_teacher("support.models:fragile", "--host", "0.0.0.0", env={"EDL_TEACHER_TOKEN": "t"}) as teacher,
        TeacherConnection(teacher.address, token="t") as connection,
    ):
        assert not teacher.address.startswith("0.0.0.0")
        connection.infer({"x": np.zeros((3, 4), np.float32)}, [])
        with pytest.raises(InferenceError, match="one is too many"):
            connection.infer({"x": rows(1)}, [])
        with pytest.raises(InferenceError, match="is unknown"):
            connection.infer({"y": rows(1)}, [])
        with pytest.raises(urllib.error.HTTPError, match="401"):
            metrics(teacher)
        counted = metrics(teacher, "t")
    assert {name: value for name, value in counted.items() if name.startswith("edl_teacher_requests_total")} == {
        'edl_teacher_requests_total{status="200"}': 1,
        'edl_teacher_requests_total{status="400"}': 1,
        'edl_teacher_requests_total{status="401"}': 1,
        'edl_teacher_requests_total{status="500"}': 1,
    }
    assert (counted["edl_teacher_run_rows_sum"], counted["edl_teacher_run_rows_count"]) == (4, 2)
    assert counted['edl_teacher_run_rows_bucket{le="2"}'] == 1
    assert counted["edl_teacher_connections"] == 2
    assert counted["edl_teacher_busy_seconds_total"] > 0
