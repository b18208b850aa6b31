"""Ports that a trainer will listen on, kept free for it until then."""

from __future__ import annotations

import ipaddress
import socket
from typing import Self

from edl_runtime.errors import SpecError


def check_host(host: str) -> None:
    """Raise SpecError if gloo would listen on loopback only, though instances are to be reached at `host`.

    Paddle has gloo listen at the address that the machine's own name stands for, and can't be told another.
    """
    name = socket.gethostname()
    try:
        own = socket.gethostbyname(name)
    except OSError:
        own = "127.0.0.1"  # which is what Paddle takes then
    if _is_loopback(own) and not _is_loopback(host):
        allowed = (
            f"127.0.0.1 while this machine's name, {name!r}, stands for {own}: gloo listens there. "
            f"Give the name an address that the job's other instances reach, in /etc/hosts or DNS"
        )
        raise SpecError("settings.host (EDL_HOST)", host, allowed)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]).is_loopback
    except OSError:
        return False


class Ports:
    """Two ports of `host` that nobody is given by chance while they are kept, others for each generation.

    `store` is where rank 0 listens for the others, `trainer` for the trainer itself: who is told of them can listen on
    them all the same. A context manager; entering raises SpecError when `host` is no address of this machine.
    """

    def __init__(self, host: str) -> None:
        self.store = 0
        self.trainer = 0
        self._host = host
        self._generation = -1
        self._kept: list[socket.socket] = []

    def __enter__(self) -> Self:
        self.renew(0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for kept in self._kept:
            kept.close()

    def renew(self, generation: int) -> None:
        """Choose others unless that was done for this generation; the last two pairs are kept."""
        if generation == self._generation:
            return
        self._generation = generation
        pair = [self._bind(), self._bind()]
        for kept in self._kept[:-2]:
            kept.close()
        self._kept = [*self._kept[-2:], *pair]
        self.store, self.trainer = (kept.getsockname()[1] for kept in pair)

    def _bind(self) -> socket.socket:
        try:
            family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
            bound = socket.socket(family, socket.SOCK_STREAM)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as whoever will listen on it does
            bound.bind((self._host, 0))
        except OSError as error:
            allowed = f"an address of this machine that the job's other instances reach ({error.strerror})"
            raise SpecError("settings.host (EDL_HOST)", self._host, allowed) from None
        return bound
