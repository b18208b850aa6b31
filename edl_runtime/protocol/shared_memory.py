"""Memory that a student shares with a teacher on the same machine, in which the inputs of its requests lie.

Through a socket, large inputs are copied twice, by student and teacher; here once, by the student. What goes through
the socket is the JSON alone, in which each tensor says where it lies (Triton's system shared memory extension).

The memory can't be taken away from under the teacher: it has no name, and seals keep it from shrinking and from getting
holes. What is written in it may change at any time, though: a reader must not rely on reading the same number twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from edl_runtime.protocol.tensors import Array

SHARED_MEMORY_EXTENSION = "shared_memory"
"""What the signature of a teacher lists that can read inputs from shared memory."""

REGION_NAME = "inputs"
"""The name of the one region that a connection may have."""

REGISTER_PATH = f"/v2/systemsharedmemory/region/{REGION_NAME}/register"

MAX_REGION_BYTES = 256 * 1024 * 1024
"""Most bytes of a region. Larger requests go through the socket."""

SEALS = 0x1 | 0x2 | 0x4 | 0x10
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_FUTURE_WRITE (Linux 5.1): no change of its size and no holes."""

TENSORS_START = 64
"""Where tensors begin, behind the secret."""

_GRAIN = 1024 * 1024  # regions are multiples of it


class Registration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a teacher finds a region: descriptor `fd` of process `pid`, if `secret` is what stands at its beginning.

    Without the secret, who is reached through a tunnel or in another PID namespace might find another's memory.
    """

    pid: int
    fd: int
    secret: str


class ClientRegion:
    """Memory for the inputs of one request at a time. It is freed when nobody refers to it any more."""

    def __init__(self, room: int) -> None:
        """Make one with `room` bytes for tensors. Raises OSError where the system has no such memory."""
        size = TENSORS_START + room
        size += -size % _GRAIN
        self.room = size - TENSORS_START
        self._descriptor = os.memfd_create("edl-student", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._secret = secrets.token_hex(TENSORS_START // 2)
        try:
            os.truncate(self._descriptor, size)
            os.posix_fallocate(self._descriptor, 0, size)  # an error where memory is short, not a crash later on
            self._bytes = np.frombuffer(mmap.mmap(self._descriptor, size), np.uint8)
            self._bytes[:: mmap.PAGESIZE] = 0  # allocated alone, a page still counts as a hole
            self._bytes[:TENSORS_START] = np.frombuffer(self._secret.encode(), np.uint8)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(self._descriptor)
            raise

    @contextlib.contextmanager
    def offered(self) -> Iterator[bytes]:
        """Yield what to register it with, once. Nobody can do so afterwards."""
        try:
            yield msgspec.json.encode(Registration(os.getpid(), self._descriptor, self._secret))
        finally:
            os.close(self._descriptor)

    def write(self, buffers: Sequence[Array]) -> None:
        """Copy contiguous arrays in, one behind the other. Other threads go on meanwhile."""
        end = TENSORS_START
        for array in buffers:
            start, end = end, end + array.nbytes
            self._bytes[start:end] = array.reshape(-1).view(np.uint8)


@functools.lru_cache(maxsize=256)  # a student asks the same for every batch
def point_to_region(header: bytes) -> bytes:
    """Return the JSON of a request with binary tensors, changed to say that they lie in the region instead."""
    request = msgspec.json.decode(header)
    offset = TENSORS_START
    for tensor in request["inputs"]:
        size = tensor["parameters"].pop("binary_data_size")
        tensor["parameters"] |= {
            "shared_memory_region": REGION_NAME,
            "shared_memory_offset": offset,
            "shared_memory_byte_size": size,
        }
        offset += size
    return msgspec.json.encode(request)
