"""Two ranks in one process; the network is cut while one waits: prints the error that it raises.

Run in a network namespace of its own (`unshare --user --map-root-user --net`).
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct

import numpy as np

from edl_runtime.elastic.comm import bootstrap

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def switch_loopback(*, on: bool) -> None:
    """Bring the loopback interface up or down."""
    with socket.socket() as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sh", b"lo", 0))
        flags = struct.unpack("16sh", answer)[1]
        flags = flags | IFF_UP if on else flags & ~IFF_UP
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags))


def main() -> None:
    """Connect two ranks, cut the network, and wait for the other one."""
    bootstrap.UNREACHABLE_S = 2
    switch_loopback(on=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    first, second = bootstrap.ControlChannel({1: other}), bootstrap.ControlChannel({0: end})
    switch_loopback(on=False)
    try:
        first.all_reduce(np.zeros(1, np.int64))
    except OSError as error:
        print(json.dumps(type(error).__name__))  # noqa: T201
    del second


if __name__ == "__main__":
    main()
