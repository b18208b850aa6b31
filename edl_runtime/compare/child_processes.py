"""The processes that a comparison starts: teachers, and the user's script. None outlives its block."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from edl_runtime.backends.local.instances import KILL_TIMEOUT_S, start_wrapped
from edl_runtime.compare.results import RunError
from edl_runtime.exit_status import describe_exit

LAST_LINES = 15
LOOK_EVERY_S = 0.2
TAIL_BYTES = 16 * 1024
"""What is read of a log; its last lines are asked for often, and it may be long."""

TEACHER_READY_S = 300.0
"""How long a teacher may take to load its model."""

_ANSWERED = 'edl_teacher_requests_total{status="200"}'
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

GRACE_S = 5.0
"""How long a process that is told to end may take."""


@contextmanager
def running_teachers(
    command: Sequence[str], each: Sequence[Sequence[str]], env: Mapping[str, str], folder: Path
) -> Iterator[list[str]]:
    """Run `edl teacher` once for each of these lists of flags; yield their addresses when all are ready.

    Raises RunError when one does not come up.
    """
    with ExitStack() as stack:
        logs = [folder / f"teacher-{number}.log" for number in range(len(each))]
        processes = [
            stack.enter_context(_running([*command, *flags], env, log, stdout=subprocess.PIPE))
            for flags, log in zip(each, logs, strict=True)
        ]
        until = time.monotonic() + TEACHER_READY_S
        yield [_address(process, log, until) for process, log in zip(processes, logs, strict=True)]


def run_script(command: Sequence[str], env: Mapping[str, str], log: Path, on_progress: Callable[[str], None]) -> None:
    """Run a script to its end; `on_progress` gets its last lines. Raises RunError unless it exits with 0."""
    words = [sys.executable if word == "python" else word for word in command[:1]] + list(command[1:])
    with _running(words, env, log) as process:
        while True:
            try:
                code = process.wait(LOOK_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                on_progress(next(iter(last_lines(log)[-1:]), ""))
    if code:
        raise RunError(f"the script {describe_exit(code)}", last_lines(log))


def last_lines(log: Path, count: int = LAST_LINES) -> list[str]:
    """Return the last lines of a log that say anything."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-count:]


def answered_requests(address: str, token: str) -> int:
    """Return how many requests a teacher has answered, by its metrics. Raises RunError when it does not say."""
    request = urllib.request.Request(f"http://{address}/metrics")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with _DIRECT.open(request, timeout=GRACE_S) as answer:
            said: str = answer.read().decode()
    except OSError as error:
        raise RunError(f"a teacher does not say what it has answered: {error}") from None
    return sum(int(float(line.rpartition(" ")[2])) for line in said.splitlines() if line.startswith(_ANSWERED))


@contextmanager
def _running(
    command: Sequence[str], env: Mapping[str, str], log: Path, stdout: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a session of its own, so that Ctrl-C reaches only us, who end it and all it started.

    It ends with us, too, should we be killed.
    """
    if shutil.which(command[0], path=env.get("PATH")) is None:
        raise RunError(f"{command[0]!r} can't be started: there is no such program")
    with log.open("ab") as said:
        try:
            process, lifeline = start_wrapped(command, env=env, output=said if stdout is None else stdout, errors=said)
        except (OSError, ValueError) as error:
            raise RunError(f"{command[0]!r} can't be started: {error}") from None
    try:
        yield process
    finally:
        _end(process, lifeline)
        if process.stdout is not None:
            process.stdout.close()


def _end(process: subprocess.Popen[bytes], lifeline: int) -> None:
    """End a process and what it has left running."""
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    finally:  # at a second Ctrl-C too
        os.close(lifeline)
        try:
            process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path, until: float) -> str:
    line = _first_line(process.stdout, until) if process.stdout else b""
    if line is None:
        raise RunError(f"a teacher was not ready within {TEACHER_READY_S:.0f} s", last_lines(log))
    if not line:
        raise RunError("a teacher ended before it was ready", last_lines(log))
    address: str = msgspec.json.decode(line)["address"]
    return address


def _first_line(output: IO[bytes], until: float) -> bytes | None:
    """Return what a process prints first, nothing if it ends before, None if that takes too long."""
    ready, _, _ = select.select([output], [], [], max(0.0, until - time.monotonic()))
    return output.readline() if ready else None
