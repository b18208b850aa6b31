"""Students in processes of their own, from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import pytest
from support.paths import TESTS


@contextlib.contextmanager
def student(story: str, address: str, env: Mapping[str, str] = MappingProxyType({})) -> Iterator[subprocess.Popen[str]]:
    """Start a story of `student.py`; it is killed at the end at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "support.students.student", story, address],
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


def until_it_says(process: subprocess.Popen[str], word: str) -> None:
    """Return when that word was in a line that it printed, and fail if it ends before."""
    assert process.stdout is not None
    for line in process.stdout:
        if word in line.split():
            return
    pytest.fail(process.communicate()[1])
