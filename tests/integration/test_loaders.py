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
"""Time limit of a scenario; each spawned worker imports Paddle."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "method"),
    [
        ("source", "fork"),
        ("abandoned", "fork"),
        ("wrong", "fork"),
        ("raises", "fork"),
        ("thread", "fork"),
        ("late", "fork"),
        ("inside", "fork"),
        ("source", "spawn"),
        ("inside", "spawn"),
    ],
)
def test_a_reader_works_with_the_workers_of_a_loader(scenario: str, method: str) -> None:
    """See `support.students.loading`: each batch once and in order, errors are raised, and no worker remains."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.students.loading", scenario, method],
        cwd=TESTS,
        env={name: value for name, value in os.environ.items() if not name.startswith("EDL_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too
        process.communicate()
    assert (process.returncode, output.splitlines()[-1:]) == (0, ["passed"]), errors
