"""The first process of an instance's pod, as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

GOES_WELL = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); "
GOES_BADLY = GOES_WELL.replace("exit(0)", "exit(3)")


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "edl_runtime.backends.kubernetes.init", sys.executable, "-c", code]
    env = {**os.environ, "EDL_RESULT_FILE": str(folder / "result.json")}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("code", "exit_status"), [("", 0), ("raise SystemExit(3)", 3)])
def test_its_exit_status_is_the_commands(tmp_path: Path, code: str, exit_status: int) -> None:
    """A pod ends as its instance does."""
    with start(code, tmp_path) as process:
        assert process.wait(30) == exit_status


def test_a_signal_is_told_as_shells_do(tmp_path: Path) -> None:
    """A process that a signal has ended has no exit status of its own."""
    with start("import os; os.kill(os.getpid(), 9)", tmp_path) as process:
        assert process.wait(30) == 128 + signal.SIGKILL


@pytest.mark.parametrize(("code", "exit_status"), [(GOES_WELL, 128 + signal.SIGTERM), (GOES_BADLY, 3)])
def test_who_is_told_to_go_has_not_done_all_work(tmp_path: Path, code: str, exit_status: int) -> None:
    """A Job takes an exit status of 0 for success, also that of a pod which is evicted."""
    with start(f"{code}signal.pause()", tmp_path) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == exit_status
