"""`edl compare` with real teachers and a student's script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from support.paths import TESTS
from support.teachers.process import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

Compare = Callable[..., subprocess.Popen[str]]

STUDENT = ("python", "support/students/tiny_student.py")

ELSEWHERE = {"EDL_TEACHERS": "127.0.0.1:9", "EDL_POOL": "elsewhere", "EDL_JOB": "another"}
"""What whoever compares may have in the environment, and neither teachers nor script may use."""


@pytest.fixture
def mark() -> str:
    """What is in the environment of every process that a test starts, directly or not."""
    return uuid.uuid4().hex


@pytest.fixture
def compare(mark: str, tmp_path: Path) -> Iterator[Compare]:
    """Starts `edl compare` with a teacher; what is given follows."""
    started = []

    def start(*words: str, model: str = "support.models:arithmetic") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "edl_runtime.cli", "compare", "--model", model, "--teachers", "1", *words]
        env = {**os.environ, "EDL_TEST_MARK": mark, "TMPDIR": str(tmp_path), **ELSEWHERE}
        process = subprocess.Popen(
            command, cwd=TESTS, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for left in marked(mark):
        left.kill()


def marked(mark: str) -> list[psutil.Process]:
    """Return all processes that a test has started and that still run; each knows its `cmdline`."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ", "status"])
        if (process.info["environ"] or {}).get("EDL_TEST_MARK") == mark
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def script_runs(mark: str) -> bool:
    """Whether the script that hangs has started; what has just been forked from the command has its words, too."""
    found = [one.info["cmdline"] or [] for one in marked(mark)]  # None of one that has just ended
    return any("--hangs" in words and "compare" not in words for words in found)


def measured(process: subprocess.Popen[str], status: int) -> dict[str, Any]:
    """Wait for a comparison to end with `status`; return what it printed as JSON, by way."""
    printed, said = process.communicate(timeout=4 * PATIENCE_S)
    assert process.returncode == status, said
    return {row["way"]: row for row in msgspec.json.decode(printed)}


def test_one_command_measures_every_way(compare: Compare, mark: str) -> None:
    """The same script, unchanged but for a flag in the first; it checks each answer itself. Nothing is left running.

    Each run of a way has its own seed.
    """
    words = ("--json", "--teachers", "2", "--repeat", "2", "--pure", "--alone", "--", *STUDENT, "--seed={seed}")
    rows = measured(compare(*words), 0)
    assert list(rows) == ["none", "inprocess", "offline", "service"]
    assert all([run["batch_size"] for run in row["runs"]] == [16, 16] for row in rows.values())
    assert [run["accuracy"] for run in rows["none"]["runs"]] == pytest.approx([0.9, 0.91])
    for way in ("inprocess", "offline", "service"):
        assert rows[way]["accuracy"]["mean"] == pytest.approx(1, abs=1e-3)
        assert rows[way]["accuracy_gain"]["mean"] == pytest.approx(0.095, abs=1e-3)
        assert rows[way]["accuracy_gain"]["paired"]
        assert rows[way]["relative"] > 0
    assert rows["offline"]["note"].startswith("64 answers, ")
    assert marked(mark) == []


def test_a_model_that_cant_be_served_fails_the_ways_that_need_it(compare: Compare) -> None:
    """With what its teacher said of it; the way without teachers is measured."""
    words = ("--ways", "service,none", "--pure", "--alone", "--", *STUDENT)
    process = compare(*words, model="support.models:nothing")
    table, said = process.communicate(timeout=4 * PATIENCE_S)
    assert process.returncode == 1, said
    assert "90.0%" in table
    _, failure = table.split("service distillation failed: a teacher ended before it was ready\n")
    assert "support.models:nothing" in failure


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.deep)])
def test_ctrl_c_leaves_no_process(compare: Compare, mark: str, number: signal.Signals) -> None:
    """In the middle of a way: teachers and script are gone when the command is."""
    process = compare("--ways", "service", "--", *STUDENT, "--hangs")
    wait_until(lambda: script_runs(mark))
    assert len(marked(mark)) >= 4  # the command, the script, a teacher and its predictor
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert marked(mark) == []


def test_a_killed_command_takes_its_processes_along(compare: Compare, mark: str) -> None:
    """Nobody is there to end them: teachers, their predictors and the script end by themselves."""
    process = compare("--ways", "service", "--", *STUDENT, "--hangs")
    wait_until(lambda: script_runs(mark))
    assert len(marked(mark)) >= 4
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    wait_until(lambda: marked(mark) == [])


def test_a_script_that_does_not_ask_the_given_teachers_is_not_measured(compare: Compare) -> None:
    """Whatever it trained with, it was not what is compared; and one that needs teachers is told of --pure."""
    rows = measured(compare("--json", "--ways", "service,none", "--", *STUDENT, "--alone-with-teachers"), 1)
    assert "--pure" in rows["none"]["reason"]
    assert rows["service"]["reason"].startswith("the script sent no request to its teachers")
    assert not rows["service"]["runs"]
