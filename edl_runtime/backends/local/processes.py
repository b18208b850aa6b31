"""The processes of a supervisor's instances: started, told to go, reaped.

Reaping happens in one place, on SIGCHLD, so that no process started in between is taken for an orphan.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from edl_runtime.backends.local import instance

KILL_S = 5.0
"""How long an instance's wrapper may take to kill what it holds before it is killed itself."""


def start_wrapped(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    output: BinaryIO | int,
    errors: BinaryIO | None = None,
    cwd: Path | None = None,
    lock: int | None = None,
) -> tuple[subprocess.Popen[bytes], int]:
    """Start `command` in a wrapper (see `instance`) and a session of its own; return the wrapper and its lifeline.

    Closing the lifeline, as the end of this process does, kills the command and all that it started. The descriptor
    `lock` stays open in the wrapper, which thus holds that lock. `errors` go to the `output` unless they have a file of
    their own. Raises OSError; ValueError for a null byte.
    """
    kept, lifeline = os.pipe()
    descriptors = (kept,) if lock is None else (kept, lock)
    try:
        wrapper = subprocess.Popen(
            [sys.executable, "-I", "-S", instance.__file__, ",".join(map(str, descriptors)), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if errors is None else errors,
            cwd=cwd,
            env=dict(env),
            pass_fds=descriptors,
            start_new_session=True,
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(kept)
    return wrapper, lifeline


class InstanceProcess:
    """A running instance: its wrapper's process and the lifeline that keeps it alive."""

    def __init__(self, wrapper: subprocess.Popen[bytes], lifeline: int) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._wrapper = wrapper
        self._lifeline = lifeline

    @property
    def pid(self) -> int:
        return self._wrapper.pid

    def reap(self) -> bool:
        """Return whether the process has ended; then `ended` has its exit code, negative for a signal."""
        exit_code = self._wrapper.poll()
        if exit_code is None:
            return False
        self._cut()
        self.ended.set_result(exit_code)
        return True

    async def run(self, leave: asyncio.Event, grace_s: float) -> int:
        """Return the exit code once the instance has ended; when `leave` is set, make it end within `grace_s`."""
        leaving = asyncio.create_task(leave.wait())
        first: list[asyncio.Future[Any]] = [self.ended, leaving]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not self.ended.done():
            self._wrapper.terminate()
            await asyncio.wait([self.ended], timeout=grace_s)
        if not self.ended.done():
            self._cut()
            await asyncio.wait([self.ended], timeout=KILL_S)
        if not self.ended.done():
            self._wrapper.kill()  # its orphans become the supervisor's and are killed when it is reaped
        return await self.ended

    def _cut(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


class Processes:
    """All processes of one supervisor. Enter it in the main thread, with the loop running.

    `lock` is the descriptor of a lock that each instance holds as long as anything of it lives.
    """

    def __init__(self, lock: int) -> None:
        self._lock = lock
        self._running: dict[int, InstanceProcess] = {}

    def __enter__(self) -> Self:
        instance.adopt_orphans()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def start(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> InstanceProcess:
        """Start `command` with its output appended to `log`. Raises OSError; ValueError for a null byte.

        A command that can't be run is not noticed here: the instance says so in its log and exits with 127.
        """
        with log.open("ab") as output:
            process = InstanceProcess(*start_wrapped(command, env=env, cwd=cwd, output=output, lock=self._lock))
        self._running[process.pid] = process
        return process

    def _reap(self) -> None:
        ended = [pid for pid, process in self._running.items() if process.reap()]
        for pid in ended:
            del self._running[pid]
        with suppress(OSError):
            instance.kill_descendants(spare=self._running)
