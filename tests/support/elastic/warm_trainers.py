"""Trainers that start quickly: forks of one process that has imported Paddle."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PROGRAM = Path(__file__).with_name("warm_process.py")


class WarmProcess:
    """A process that was forked, with as much of `subprocess.Popen` as tests need."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self.pid = _number(status)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, None before it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a warm trainer", timeout or 0.0)
            self.returncode = _number(self._status)
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _number(status: socket.socket) -> int:
    return struct.unpack("i", status.recv(4, socket.MSG_WAITALL))[0]


@functools.cache
def _forker() -> socket.socket:
    """Start the process that forks trainers; it ends with this one."""
    ours, theirs = socket.socketpair()
    environ = {**os.environ, "GLOG_minloglevel": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, env=environ, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        process.wait(100)

    atexit.register(end)
    return ours


def begin(
    command: Sequence[str], environ: Mapping[str, str], agent_socket: socket.socket, errors: IO[bytes]
) -> WarmProcess:
    """Start `python COMMAND…` with its end of the socket to an agent."""
    ours, theirs = socket.socketpair()
    request = json.dumps({"command": list(command), "environ": dict(environ)}).encode()
    with theirs:
        socket.send_fds(_forker(), [request], [agent_socket.fileno(), theirs.fileno(), errors.fileno()])
    return WarmProcess(ours)
