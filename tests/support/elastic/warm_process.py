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

import edl_runtime.elastic.api
import edl_runtime.elastic.training.loop  # noqa: F401


def serve(control: socket.socket) -> dict[str, list[str]] | None:
    """Fork for each request until nobody is there to ask; return what is asked for, in the fork."""
    lives: dict[int, tuple[int, socket.socket]] = {}
    """By what tells of a fork's end, which is it and who hears of it."""
    while True:
        ready, _, _ = select.select([control, *lives], [], [])
        if control in ready:
            words, fds, *_ = socket.recv_fds(control, 1 << 16, 3)
            if not words:
                return None
            line, life, errors = fds
            if (pid := os.fork()) == 0:
                control.close()
                for ending, (_, other) in lives.items():
                    os.close(ending)
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
            told = socket.socket(fileno=life)
            told.sendall(struct.pack("i", pid))
            lives[os.pidfd_open(pid)] = pid, told
        for ended in lives.keys() & set(ready):
            pid, told = lives.pop(ended)
            os.close(ended)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with told, contextlib.suppress(OSError):
                told.sendall(struct.pack("i", status))


if __name__ == "__main__":
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request:
        sys.argv = request["command"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
