"""A process that has imported Paddle, and becomes a training script as often as it is asked to: `warm_process.py FD`.

Each request on that socket comes with the end of the trainer's line to its agent, and of a socket to which the exit
status is written. What is asked for is a fork that runs the script as `python SCRIPT OUT` does.
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

import paddle  # noqa: F401 - what takes long

import edl_runtime.elastic.run
import edl_runtime.elastic.training  # noqa: F401


def serve(control: socket.socket) -> dict[str, list[str]] | None:
    """Fork for each request until nobody is there to ask; return what is asked for, in the fork."""
    lives: dict[int, socket.socket] = {}
    while True:
        asked, _, _ = select.select([control], [], [], 0.01)
        if asked:
            words, fds, *_ = socket.recv_fds(control, 1 << 16, 3)
            if not words:
                return None
            line, life, errors = fds
            if (pid := os.fork()) == 0:
                for other in (control, *lives.values()):
                    other.close()
                os.close(life)
                os.dup2(errors, 2)
                os.close(errors)
                request = json.loads(words)
                os.environ.clear()
                os.environ.update(request["environ"], EDL_AGENT_FD=str(line))
                os.set_inheritable(line, True)
                return request
            os.close(line)
            os.close(errors)
            lives[pid] = socket.socket(fileno=life)
            lives[pid].sendall(struct.pack("i", pid))
        for pid in list(lives):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with lives.pop(pid) as told, contextlib.suppress(OSError):
                    told.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request:
        sys.argv = request["command"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
