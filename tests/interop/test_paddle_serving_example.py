"""The quick start of EDL: its page's commands with a real Paddle Serving."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.external_servers import START_S, environment
from support.network.ports import free_ports
from support.paddle_serving_example import PIPELINE, SAVE, STUDENT, accuracy_in, address, train, words
from support.teachers.process import wait_until

from edl_runtime.external.connection import connect
from edl_runtime.protocol.errors import ProtocolError, TeacherError
from edl_runtime.settings import RuntimeSettings


def answers(teacher: str) -> bool:
    connection = connect(teacher, RuntimeSettings(), timeout_s=1.0)
    try:
        connection.signature()  # asks about a row
    except (OSError, TeacherError, ProtocolError):
        return False
    finally:
        connection.close()
    return True


def test_its_commands_run_as_they_stand(tmp_path: Path) -> None:
    """What Paddle 3 saves is served by a pipeline, and a student gets far from chance by its answers alone."""
    pytest.importorskip("paddle")
    environment("paddle-serving")
    train(words(SAVE), tmp_path)
    port, grpc_port = free_ports(2)
    teacher = address("pipeline", port)
    command = [*words(PIPELINE, port), "--grpc_port", str(grpc_port)]
    with (tmp_path / "log").open("wb") as log:
        pipeline = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(teacher), START_S)
        *flags, _ = words(STUDENT)
        assert accuracy_in(train([*flags, teacher], tmp_path)) > 60
    finally:
        for process in (*psutil.Process(pipeline.pid).children(recursive=True), pipeline):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        pipeline.wait()
