"""Airflow's components as processes that never outlive their parent."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from edl_runtime.backends.local.instances import start_wrapped
from edl_runtime.errors import EdlError


class ComponentError(EdlError):
    """Raised when a component has ended too early, or failed. `last_lines` are its log's."""

    def __init__(self, name: str, exit_status: int, log: Path) -> None:
        super().__init__(name, exit_status, log)
        self.name = name
        self.exit_status = exit_status
        self.log = log
        self.last_lines = tuple(log.read_text(errors="replace").splitlines()[-15:])

    def __str__(self) -> str:
        lines = "\n".join(f"  {line}" for line in self.last_lines)
        return f"`airflow {self.name}` ended with {self.exit_status}; {self.log} ends with\n{lines}"


class Component:
    """One command of Airflow, with its child processes, in its own session.

    Its output goes to `log`. It holds the file lock `lock` while one of its processes lives. All are killed when this
    process ends in any way: their wrapper waits on a pipe whose other end only this process holds.
    """

    def __init__(self, name: str, words: Sequence[str], *, env: Mapping[str, str], log: Path, lock: int) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            started = start_wrapped(words, env=env, cwd=log.parent, output=output, lock=lock)
        self._wrapper, self._lifeline = started

    def check(self) -> None:
        """Raise ComponentError if it has ended."""
        exit_status = self._wrapper.poll()
        if exit_status is not None:
            raise ComponentError(self.name, exit_status, self.log)

    def finish(self) -> None:
        """Wait until it has ended. Raises ComponentError if it has failed."""
        exit_status = self._wrapper.wait()
        self.cut()
        if exit_status:
            raise ComponentError(self.name, exit_status, self.log)

    def terminate(self) -> None:
        """Ask it to end."""
        self._wrapper.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended, for `timeout_s` at most."""
        try:
            self._wrapper.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return

    def cut(self) -> None:
        """Kill its remaining processes, and wait for their end."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        self._wrapper.wait()
