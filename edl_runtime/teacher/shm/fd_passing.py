"""Passes clients' shared memory from the server, which checks it, to a predictor, which reads it.

Each region is sent once, as a descriptor, before the first request that uses it. The predictor keeps it mapped until
the server sends that its client has disconnected.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

from edl_runtime.teacher.shm.regions import MappedRegion

_NUMBER = struct.Struct("=q")


def region_channel() -> tuple[socket.socket, socket.socket]:
    """Return the server's and the predictor's end of a channel for regions, both non-blocking."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # datagrams keep number and descriptor together
    for end in (ours, theirs):
        end.setblocking(False)
    return ours, theirs


class RegionSender:
    """The server's end. `forget` is called with the number of a region whose client has disconnected."""

    def __init__(self, channel: socket.socket, forget: Callable[[int], None]) -> None:
        self._channel = channel
        self._forget = forget
        self._sent_regions: set[int] = set()

    def send_region(self, region: MappedRegion) -> int:
        """Send `region` unless that was done before; return its number, 0 if it can't be sent."""
        if region.number not in self._sent_regions:
            try:
                socket.send_fds(self._channel, [_NUMBER.pack(region.number)], [region.descriptor])
            except OSError:
                return 0
            self._sent_regions.add(region.number)
            region.on_close.append(self._take_back)
        return region.number

    def _take_back(self, region: MappedRegion) -> None:
        self._sent_regions.discard(region.number)
        self._forget(region.number)

    def close(self) -> None:
        self._channel.close()


class RegionReceiver:
    """The predictor's end."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._regions: dict[int, MappedRegion] = {}

    def view(self, number: int) -> memoryview | None:
        """Return the memory of a region; None for 0, and for one that was lost or could not be mapped."""
        try:
            while number and number not in self._regions:
                self._receive()
            return self._regions[number].view if number else None
        except (OSError, ValueError):
            return None

    def _receive(self) -> None:
        """Receive the next region. Raises OSError when there is none."""
        data, (descriptor, *_), _, _ = socket.recv_fds(self._channel, _NUMBER.size, 1)
        self._regions[_NUMBER.unpack(data)[0]] = MappedRegion(descriptor)

    def forget(self, number: int) -> None:
        """Close a region; waiting requests keep it mapped."""
        region = self._regions.pop(number, None)
        if region is not None:
            region.close()
