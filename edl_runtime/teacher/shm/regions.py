"""Memory that clients on this machine share with a teacher, so that inputs need not go through the socket.

Clients are not trusted. A client names a process and a descriptor; they are used only if they lead to memory of the
teacher's own user that can neither shrink nor get holes (access to a missing page would kill a predictor), and that
begins with the secret in the registration, so that nobody registers the memory of another client.
"""

from __future__ import annotations

import fcntl
import functools
import hmac
import itertools
import mmap
import os
import socket
import stat
import struct
from collections.abc import Callable

import msgspec

from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.shared_memory import MAX_REGION_BYTES, SEALS, TENSORS_START, Registration

REGISTRATION_LIMIT = 4096
"""Bytes of a registration at most."""

MAX_REGIONS = 64
"""Regions that a teacher keeps open. Further clients use the socket."""

_decoder = JsonDecoder(Registration)
_NUMBER = struct.Struct("=q")
_numbers = itertools.count(1)


class MappedRegion:
    """A client's memory, open for reading.

    - `number`: identifies it between the server and its predictors.
    - `on_close`: called with the region when its client has disconnected.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.number = next(_numbers)
        self.on_close: list[Callable[[MappedRegion], None]] = []

    @functools.cached_property
    def view(self) -> memoryview:
        """The memory, read-only; mapped at first use, unmapped with its last view."""
        return memoryview(mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ))

    def close(self) -> None:
        """Close the descriptor, drop the mapping and call `on_close`."""
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)
        self.__dict__.pop("view", None)
        for callback in self.on_close:
            callback(self)


class RegionTable:
    """The regions that clients have registered. `available` is False where the system has no memfd."""

    def __init__(self) -> None:
        self.available = hasattr(os, "memfd_create")
        self._open: set[MappedRegion] = set()

    def register(self, body: memoryview) -> MappedRegion:
        """Open and check the region of a registration. Raises ProtocolError."""
        try:
            registration = _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"not a registration of shared memory: {error}") from None
        if not self.available or len(self._open) >= MAX_REGIONS:
            raise ProtocolError(f"no more shared memory can be registered: there are {len(self._open)} regions")
        descriptor = _open_memory(registration)
        try:
            _check(descriptor, registration)
        except BaseException:
            os.close(descriptor)
            raise
        region = MappedRegion(descriptor)
        self._open.add(region)
        return region

    def close(self, region: MappedRegion) -> None:
        self._open.discard(region)
        region.close()


def _open_memory(registration: Registration) -> int:
    """Return a read-only descriptor of a registration's memory, if it is a memfd of this user."""
    path = f"/proc/{registration.pid}/fd/{registration.fd}"
    try:
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)  # O_PATH: no side effects, whatever kind of file it is
        try:
            about = os.fstat(found)
            if not stat.S_ISREG(about.st_mode) or about.st_dev != _memory_device() or about.st_uid != os.geteuid():
                raise ProtocolError("shared memory has to be a memfd of the teacher's own user")
            return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(found)
    except OSError as error:
        raise ProtocolError(f"can't open shared memory {path}: {error.strerror}") from None


def _check(descriptor: int, registration: Registration) -> None:
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ProtocolError(f"shared memory must have the seals {SEALS:#x}, so that it can't shrink or get holes")
        size = os.fstat(descriptor).st_size
        if not TENSORS_START <= size <= MAX_REGION_BYTES:
            raise ProtocolError(f"shared memory has {size} bytes, allowed are {TENSORS_START} to {MAX_REGION_BYTES}")
        if os.lseek(descriptor, 0, os.SEEK_HOLE) != size:
            raise ProtocolError("shared memory must have all its pages")
        if not hmac.compare_digest(os.pread(descriptor, TENSORS_START, 0), registration.secret.encode()):
            raise ProtocolError("shared memory does not begin with the secret")
    except OSError as error:
        raise ProtocolError(f"not shared memory: {error.strerror}") from None


@functools.cache
def _memory_device() -> int:
    """Return the device of memfds with pages of ordinary size."""
    descriptor = os.memfd_create("edl-probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


# From the server, which checks regions, to a predictor, which reads them. Each is sent once, as a descriptor, before
# the first request that uses it. The predictor keeps it mapped until the server sends that its client has disconnected.


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
