"""Real `edl teacher` processes for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import psutil
from support.paths import TESTS

T = TypeVar("T")
PATIENCE_S = 100.0
"""Longest wait for what takes a moment unless the machine is busy."""


class Teacher:
    """A running teacher and its address."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address

    @property
    def predictor(self) -> psutil.Process:
        """The process that runs its model."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def running_teacher(model: str, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Teacher]:
    """Start `edl teacher` with a model of `support.models` or a path; it is killed at the end at the latest."""
    with starting_teacher(model, *flags, env=env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the teacher ended with {process.wait()}: {process.communicate()[1]}"
        yield Teacher(process, msgspec.json.decode(line)["address"])


@contextmanager
def starting_teacher(model: str, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start `edl teacher`, ready or not; it is killed at the end at the latest."""
    with process("-m", "edl_runtime.cli", "teacher", "--json", "--model", model, *flags, env=env) as started:
        yield started


@contextmanager
def process(*command: object, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run Python with these arguments, and with no EDL variables but `env`; it is killed at the end at the latest."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    started = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=TESTS,
        env={**clean, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def wait_until(condition: Callable[[], T], within_s: float = PATIENCE_S) -> T:
    """Wait until `condition` is true; return its value. Fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not true within {within_s} s"
        time.sleep(0.01)
    return found


def is_gone(process: psutil.Process) -> bool:
    """Whether the process has ended, or is a zombie."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
