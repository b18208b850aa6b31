"""A process that has imported Paddle and forks a training script for each request: `warm_process.py FD`.

Each request on that socket comes with the trainer's end of its socket to the agent, a socket for the fork's process id
and exit status, and standard error. The fork runs the script as `python SCRIPT OUT` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import socket
import struct
import sys
from pathlib import Path

import paddle  # noqa: F401 - the slow import

import edl_runtime.elastic.api
import edl_runtime.elastic.training.loop  # noqa: F401


def serve(control: socket.socket) -> dict[str, list[str]] | None:
    """Fork for each request until the socket is closed; return the request in the fork, None in this process."""
    forks: dict[int, tuple[int, socket.socket]] = {}
    """Process id and status socket of each fork, by its pidfd."""
    while True:
        ready, _, _ = select.select([control, *forks], [], [])
        if control in ready:
            message, fds, *_ = socket.recv_fds(control, 1 << 16, 3)
            if not message:
                return None
            line, status_fd, errors = fds
            if (pid := os.fork()) == 0:
                control.close()
                for pidfd, (_, other) in forks.items():
                    os.close(pidfd)
                    other.close()
                os.close(status_fd)
                os.dup2(errors, 2)
                os.close(errors)
                request = json.loads(message)
                os.environ.clear()
                os.environ.update(request["environ"], EDL_AGENT_FD=str(line))
                os.set_inheritable(line, True)
                return request
            os.close(line)
            os.close(errors)
            status_socket = socket.socket(fileno=status_fd)
            status_socket.sendall(struct.pack("i", pid))
            forks[os.pidfd_open(pid)] = pid, status_socket
        for ended in forks.keys() & set(ready):
            pid, status_socket = forks.pop(ended)
            os.close(ended)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with status_socket, contextlib.suppress(OSError):
                status_socket.sendall(struct.pack("i", status))


if __name__ == "__main__":
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request:
        sys.argv = request["command"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
