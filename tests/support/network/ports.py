"""Ports for servers that need one before they start, or again after a restart."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

PORTS = range(20000, 30000)
"""Below those that the system gives to whoever asks for any."""

_reserved: list[int] = []
"""Descriptors of locked files, one for each port."""


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, and that no other process of tests gets before this one has ended."""
    folder = Path(tempfile.gettempdir()) / "edl-test-ports"
    folder.mkdir(exist_ok=True)
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)
        lock = os.open(folder / str(port), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            os.close(lock)
        else:
            _reserved.append(lock)
            found.append(port)
    return found
