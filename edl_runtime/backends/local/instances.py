"""A supervisor's instances: slots, processes and launcher.

Processes are reaped in one place, on SIGCHLD, so that no process that was just started is taken for an orphan.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from edl_runtime.backends.errors import with_agents_words
from edl_runtime.backends.interface import InstanceStatus
from edl_runtime.backends.local import instance_wrapper
from edl_runtime.backends.local.backend import NODE_NAME
from edl_runtime.backends.local.job_folders import NO_SPACE, JobFolder, full_folders, tail
from edl_runtime.concurrency import wait_for_event
from edl_runtime.specs import JobSpec

_HOUR_S = 3600.0


class FailureDetail(msgspec.Struct, frozen=True):
    """Why an instance has failed, and the end of its log."""

    reason: str
    last_lines: tuple[str, ...] = ()


class InstanceSlot:
    """One instance with all its restarts.

    `finished`: it is not started again. `short_lives`: how many in a row, see `restarts`.
    """

    def __init__(self, index: int) -> None:
        self.leave = asyncio.Event()
        self.finished = False
        self.short_lives = 0
        self.failure: FailureDetail | None = None
        self.status = InstanceStatus(index=index, phase="running", started_at=time.time(), node=NODE_NAME)
        self._ended_at: deque[float] = deque()

    def update(self, **changes: object) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)

    def request_leave(self) -> None:
        self.leave.set()
        self.update(leaving=True)

    def count_exit(self, now: float) -> int:
        """Record an exit at a monotonic time, and return how many there were within the last hour."""
        self._ended_at.append(now)
        while self._ended_at[0] <= now - _HOUR_S:
            self._ended_at.popleft()
        return len(self._ended_at)

    def may_recover(self, max_short_lives: int) -> bool:
        """Whether it runs, or has not had too many short lives yet."""
        running = self.status.phase == "running"
        return not self.status.given_up and (running or self.short_lives < max_short_lives)


KILL_TIMEOUT_S = 5.0
"""How long an instance's wrapper may take to kill its descendants before it is killed itself, and these then to end."""


def start_wrapped(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    output: BinaryIO | int,
    errors: BinaryIO | None = None,
    cwd: Path | None = None,
    lock: int | None = None,
    to_group: bool = False,
) -> tuple[subprocess.Popen[bytes], int]:
    """Start `command` in a wrapper (see `instance_wrapper`) and a new session; return the wrapper and its lifeline.

    When the lifeline closes, also by the end of this process, the command and its descendants are killed. `lock`: the
    descriptor of a lock for the wrapper to hold. `errors`: for stderr, by default as `output`. `to_group`: SIGTERM goes
    to all of the command's process group. Raises OSError; ValueError for a null byte.
    """
    kept, lifeline = os.pipe()
    descriptors = (kept,) if lock is None else (kept, lock)
    wrapping = [instance_wrapper.__file__, ",".join(map(str, descriptors)), "group" if to_group else "command"]
    try:
        wrapper = subprocess.Popen(
            [sys.executable, "-I", "-S", *wrapping, *command],
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
    """A running instance: its wrapper's process and the lifeline that keeps it alive.

    `no_orphans`: set while nothing is left of those whose wrapper was killed.
    """

    def __init__(self, wrapper: subprocess.Popen[bytes], lifeline: int, no_orphans: asyncio.Event) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._wrapper = wrapper
        self._lifeline = lifeline
        self._no_orphans = no_orphans

    @property
    def pid(self) -> int:
        return self._wrapper.pid

    def reap(self) -> bool:
        """Return whether the process has ended, and set `ended` to its exit code, negative for a signal."""
        exit_code = self._wrapper.poll()
        if exit_code is None:
            return False
        self._close_lifeline()
        self.ended.set_result(exit_code)
        return True

    async def run(self, leave: asyncio.Event, grace_s: float) -> int:
        """Wait for the exit code. Once `leave` is set, terminate the instance, and kill it after `grace_s`.

        Then nothing of it runs any more, unless the system does not end it in `KILL_TIMEOUT_S`.
        """
        leaving = asyncio.create_task(leave.wait())
        first: list[asyncio.Future[Any]] = [self.ended, leaving]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not self.ended.done():
            self._wrapper.terminate()
            await asyncio.wait([self.ended], timeout=grace_s)
        if not self.ended.done():
            self._close_lifeline()
            await asyncio.wait([self.ended], timeout=KILL_TIMEOUT_S)
        if not self.ended.done():
            self._wrapper.kill()  # the supervisor adopts its orphans, and kills them when it is reaped
        exit_code = await self.ended
        await wait_for_event(self._no_orphans, KILL_TIMEOUT_S)
        return exit_code

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


class ProcessTable:
    """All processes of one supervisor. Enter it in the main thread, with the loop running.

    `lock`: the descriptor of a lock that each instance holds while any process of it runs; None for no lock. What an
    instance leaves is killed, even when its wrapper was; children that this process has already are not.
    """

    def __init__(self, lock: int | None) -> None:
        self._lock = lock
        self._running: dict[int, InstanceProcess] = {}
        self._others: set[int] = set()
        self._no_orphans = asyncio.Event()

    def __enter__(self) -> Self:
        self._others = set(instance_wrapper.children())
        self._no_orphans.set()
        instance_wrapper.adopt_orphans()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, to_group: bool = False
    ) -> InstanceProcess:
        """Start `command` with its output appended to `log`; `to_group` as in `start_wrapped`.

        A command that can't be run raises nothing: the instance logs that and exits with 127. Raises OSError;
        ValueError for a null byte.
        """
        with log.open("ab") as output:
            started = start_wrapped(command, env=env, cwd=cwd, output=output, lock=self._lock, to_group=to_group)
        process = InstanceProcess(*started, self._no_orphans)
        self._running[process.pid] = process
        return process

    def _reap(self) -> None:
        ended = [pid for pid, process in self._running.items() if process.reap()]
        for pid in ended:
            del self._running[pid]
        with suppress(OSError):
            spare = self._others | self._running.keys()
            if instance_wrapper.kill_descendants(spare, options=os.WNOHANG):
                self._no_orphans.set()
            else:
                self._no_orphans.clear()  # the next SIGCHLD tells of their end


class InstanceLauncher:
    """Starts instances of `spec`.

    - `run_folder`: for their logs, and their working directories if the spec names none.
    - `environ`: the base of their environment; the spec's variables and `secrets` override it.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        folder: JobFolder,
        run_folder: Path,
        processes: ProcessTable,
        environ: Mapping[str, str],
        secrets: Mapping[str, str],
    ) -> None:
        self._cwd = spec.cwd
        self._has_agents = spec.elastic
        self._folder = folder
        self._run_folder = run_folder
        self._processes = processes
        self._environ = {
            **environ,
            **spec.env,
            **secrets,
            "EDL_JOB": spec.name,
            "EDL_RUN": run_folder.name,
            "EDL_GRACE_S": str(spec.grace_s),
            "PYTHONUNBUFFERED": "1",
        }
        checkpoints = spec.env.get("EDL_CHECKPOINT", "")
        written = [spec.cwd, "" if "://" in checkpoints else checkpoints]
        self._folders = [*map(Path, filter(None, written)), run_folder, Path(tempfile.gettempdir()), Path("/dev/shm")]  # noqa: S108
        self._command = [sys.executable if spec.command[0] == "python" else spec.command[0], *spec.command[1:]]

    def start(self, index: int) -> InstanceProcess:
        """Start the instance. Raises OSError; ValueError for a null byte in the command or a variable."""
        work, result = self._run_folder / "work" / str(index), self._folder.result_file(index)
        for folder in (work, result.parent):
            folder.mkdir(parents=True, exist_ok=True)
        environ = {**self._environ, "EDL_INSTANCE": str(index), "EDL_RESULT_FILE": str(result)}
        cwd = Path(self._cwd) if self._cwd else work
        return self._processes.start(self._command, env=environ, cwd=cwd, log=self._log(index))

    def failure(self, index: int, reason: str) -> FailureDetail:
        """Return the reason with what the agent's last line and full disks add to it, and the end of the log."""
        lines = tuple(tail(self._log(index)))
        ended = f"instance {index} {reason}"
        why = with_agents_words(ended, index, lines) if self._has_agents else ended
        full = full_folders(self._folders) if any(NO_SPACE in line for line in lines) else []
        where = f"; no space is left in {', '.join(full)}" if full else ""
        return FailureDetail(f"{why}{where}", lines)

    def _log(self, index: int) -> Path:
        return self._run_folder / f"{index}.log"
