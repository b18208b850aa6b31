"""The processes of a comparison: teachers, and the user's script. None outlives its `with` block."""

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
from typing import IO, cast

import msgspec

from edl_runtime.backends.local.instances import KILL_TIMEOUT_S, start_wrapped
from edl_runtime.compare.results import RunError
from edl_runtime.exit_status import describe_exit

LAST_LINES = 15
POLL_S = 0.2
TAIL_BYTES = 16 * 1024
"""Bytes read from the end of a log, which may be long and is read at each poll."""

TEACHER_READY_S = 300.0
"""Limit for the teachers to load their model."""

_ANSWERED = 'edl_teacher_requests_total{status="200"}'
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores http_proxy

GRACE_S = 5.0
"""Time from SIGTERM to SIGKILL."""


@contextmanager
def running_teachers(
    command: Sequence[str], each: Sequence[Sequence[str]], env: Mapping[str, str], folder: Path
) -> Iterator[list[str]]:
    """Run `edl teacher` once for each list of flags; yield their addresses when all are ready.

    Raises RunError when one does not become ready.
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
    """Run a script to its end; `on_progress` gets its last line. Raises RunError unless it exits with 0."""
    words = [sys.executable if word == "python" else word for word in command[:1]] + list(command[1:])
    with _running(words, env, log) as process:
        while True:
            try:
                code = process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                on_progress(next(iter(last_lines(log)[-1:]), ""))
    if code:
        raise RunError(f"the script {describe_exit(code)}", last_lines(log))


def last_lines(log: Path, count: int = LAST_LINES) -> list[str]:
    """Return the last lines of a log that are not blank."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-count:]


def answered_requests(address: str, token: str) -> int:
    """Return the number of requests that a teacher has answered, from its metrics. Raises RunError without them."""
    request = urllib.request.Request(f"http://{address}/metrics")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with _DIRECT.open(request, timeout=GRACE_S) as answer:
            metrics: str = answer.read().decode()
    except OSError as error:
        raise RunError(f"can't read a teacher's metrics: {error}") from None
    return sum(int(float(line.rpartition(" ")[2])) for line in metrics.splitlines() if line.startswith(_ANSWERED))


@contextmanager
def _running(
    command: Sequence[str], env: Mapping[str, str], log: Path, stdout: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a session of its own: Ctrl-C reaches only this process, which ends it and all it has started.

    Its wrapper ends it when this process is killed, too.
    """
    if shutil.which(command[0], path=env.get("PATH")) is None:
        raise RunError(f"{command[0]!r} can't be started: there is no such program")
    with log.open("ab") as file:
        try:
            process, lifeline = start_wrapped(command, env=env, output=file if stdout is None else stdout, errors=file)
        except (OSError, ValueError) as error:
            raise RunError(f"{command[0]!r} can't be started: {error}") from None
    try:
        yield process
    finally:
        _end(process, lifeline)
        if process.stdout is not None:
            process.stdout.close()


def _end(process: subprocess.Popen[bytes], lifeline: int) -> None:
    """End a process and all that it has started."""
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    finally:  # after a second Ctrl-C, too
        os.close(lifeline)  # the wrapper kills what is left
        try:
            process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path, until: float) -> str:
    """Return the address that a teacher prints when it is ready."""
    output = cast("IO[bytes]", process.stdout)
    ready, _, _ = select.select([output], [], [], max(0.0, until - time.monotonic()))
    if not ready:
        raise RunError(f"a teacher was not ready within {TEACHER_READY_S:.0f} s", last_lines(log))
    line = output.readline()
    if not line:
        raise RunError("a teacher ended before it was ready", last_lines(log))
    address: str = msgspec.json.decode(line)["address"]
    return address
