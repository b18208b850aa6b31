"""What a training student shows Prometheus, scraped as Prometheus does."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from support.paths import TESTS
from support.teachers.process import running_teacher

STUDENT = """
import sys
from support.students.readers import Batches
from edl_runtime.distill import DistillReader

with DistillReader(Batches(40), inputs=["x"], outputs=["double"], teacher_batch_size=4) as reader:
    for number, _ in enumerate(reader, start=1):
        if number == 10:
            print("ten", flush=True)
            sys.stdin.readline()
    print("read", flush=True)
    sys.stdin.readline()
"""

Sample = tuple[str, tuple[tuple[str, str], ...]]


@contextlib.contextmanager
def _student(script: Path, teacher: str, port: int) -> Iterator[subprocess.Popen[str]]:
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": paths, "EDL_TEACHERS": teacher, "EDL_METRICS_PORT": str(port)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _says(process: subprocess.Popen[str], *awaited: str) -> None:
    """Read what it prints until all of these words have come, in any order."""
    assert process.stdout is not None
    left = set(awaited)
    while left:
        line = process.stdout.readline()
        assert line, f"it ended and never said {left}"
        left -= {words for words in left if words in line}


def _go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _scraped(port: int) -> dict[Sample, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {
        (sample.name.removeprefix("edl_distill_"), tuple(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_reading_student_is_scraped_and_a_second_one_trains_without(tmp_path: Path) -> None:
    """Counts grow while it reads; another process on the same port says that it shows nothing, and reads on."""
    script = tmp_path / "student.py"
    script.write_text(STUDENT)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with running_teacher("support.models:slow") as teacher, _student(script, teacher.address, port) as student:
        _says(student, "metrics.shown", "ten")
        during = _scraped(port)
        assert (during["batches_total", ()], during["samples_total", ()]) == (10, 80)
        assert during["answers_total", (("teacher", teacher.address),)] == 20
        assert during["teachers", ()] == 1
        assert during["wait_seconds_total", (("for", "teachers"),)] > 0
        with _student(script, teacher.address, port) as second:
            _says(second, "metrics.not_shown", "ten")
            _go_on(second)
            _says(second, "read")
        _go_on(student)
        _says(student, "read")
        assert _scraped(port)["samples_total", ()] == 320
        with socket.socket() as other_address:
            assert other_address.connect_ex(("127.0.0.2", port)) != 0, "it listens elsewhere, too"
