"""The sockets inside Paddle's process groups, found by their descriptors in /proc.

Paddle neither exposes its sockets nor closes a group whose rank is lost: a rank that waits in a collective would wait
on, and its store would listen at all addresses for as long as the process lives. So sockets are shut down, and a
listener is replaced by a silent descriptor (`dup2`), from outside.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any


def descriptors(kind: str) -> list[int]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith(kind):
                found.append(int(entry.name))
    return found


def open_epolls() -> set[int]:
    return set(descriptors("anon_inode:[eventpoll]"))


def watched_by(epoll: int) -> list[int]:
    try:
        lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


@contextlib.contextmanager
def _borrowed(fd: int) -> Any:
    """Yield a socket object over a copy of the descriptor."""
    with socket.socket(fileno=os.dup(fd)) as end:
        yield end


def peer_port(fd: int) -> int | None:
    with contextlib.suppress(OSError), _borrowed(fd) as end:
        if end.family in {socket.AF_INET, socket.AF_INET6}:
            return int(end.getpeername()[1])
    return None


def close_listener(port: int) -> None:
    """Replace the listening socket at this port, whose descriptor Paddle owns, by a silent one.

    Shut down instead, it would be reported as readable for ever to Paddle's epoll loop.
    """
    for fd in descriptors("socket:"):
        with contextlib.suppress(OSError), _borrowed(fd) as end:
            listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and end.family in {socket.AF_INET, socket.AF_INET6} and end.getsockname()[1] == port:
                silent = os.eventfd(0)
                os.dup2(silent, fd, inheritable=False)
                os.close(silent)


def shut_down(fd: int) -> None:
    with contextlib.suppress(OSError), _borrowed(fd) as end:
        end.shutdown(socket.SHUT_RDWR)


def disable_delay(fd: int) -> None:
    """Send small messages at once: the store sends two packets for each, which cost 40 ms with Nagle's algorithm."""
    with contextlib.suppress(OSError), _borrowed(fd) as end:
        if end.type == socket.SOCK_STREAM:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def free_port(host: str) -> int:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])
