"""Paddle's DataLoader with workers: as the source of a reader, and with a reader inside its workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from support.paths import TESTS

LIMIT_S = 240.0
"""For what hangs; each spawned worker imports Paddle anew."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("story", "method"),
    [
        ("source", "fork"),
        ("left", "fork"),
        ("wrong", "fork"),
        ("thread", "fork"),
        ("late", "fork"),
        ("inside", "fork"),
        ("source", "spawn"),
        ("inside", "spawn"),
    ],
)
def test_a_loader_with_workers(story: str, method: str) -> None:
    """See `support.students.loading`: each batch once and in order, errors in their place, and no worker that stays."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.students.loading", story, method],
        cwd=TESTS,
        env={name: value for name, value in os.environ.items() if not name.startswith("EDL_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too
        process.communicate()
    assert (process.returncode, said.splitlines()[-1:]) == (0, ["right"]), errors
