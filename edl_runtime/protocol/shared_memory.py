"""Shared memory between a student and a teacher on the same machine, for the inputs of requests.

Through a socket, large inputs are copied twice, by student and teacher; here once, by the student. Only the JSON goes
through the socket, with the offset of each tensor (Triton's system shared memory extension).

The memory has no name, and seals keep it from shrinking and from getting holes, so that reading it can't crash the
teacher. Its contents may change at any time: a reader must not rely on reading the same number twice.
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
"""In the signature of a teacher that can read inputs from shared memory."""

REGION_NAME = "inputs"
"""The name of the one region that a connection may have."""

REGISTER_PATH = f"/v2/systemsharedmemory/region/{REGION_NAME}/register"

MAX_REGION_BYTES = 256 * 1024 * 1024
"""Most bytes of a region. Larger requests go through the socket."""

SEALS = 0x1 | 0x2 | 0x4 | 0x10
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_FUTURE_WRITE (Linux 5.1): no change of its size and no holes."""

TENSORS_START = 64
"""Offset of the first tensor, after the secret."""

_GRAIN = 1024 * 1024  # regions are multiples of it


class Registration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a teacher finds a region: descriptor `fd` of process `pid`, whose memory begins with `secret`.

    Without the secret, a teacher behind a tunnel or in another PID namespace might open another process's memory.
    """

    pid: int
    fd: int
    secret: str


class ClientRegion:
    """Memory for the inputs of one request at a time. It is freed with the last reference."""

    def __init__(self, room: int) -> None:
        """Make one with `room` bytes for tensors. Raises OSError if the system can't."""
        size = TENSORS_START + room
        size += -size % _GRAIN
        self.room = size - TENSORS_START
        self._descriptor = os.memfd_create("edl-student", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._secret = secrets.token_hex(TENSORS_START // 2)
        try:
            os.truncate(self._descriptor, size)
            os.posix_fallocate(
                self._descriptor, 0, size
            )  # raises if memory is short, instead of a SIGBUS on a later write
            self._bytes = np.frombuffer(mmap.mmap(self._descriptor, size), np.uint8)
            self._bytes[:: mmap.PAGESIZE] = 0  # a page that was only allocated still counts as a hole
            self._bytes[:TENSORS_START] = np.frombuffer(self._secret.encode(), np.uint8)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(self._descriptor)
            raise

    @contextlib.contextmanager
    def offered(self) -> Iterator[bytes]:
        """Yield the JSON to register it with, once: its descriptor is closed after the block."""
        try:
            yield msgspec.json.encode(Registration(os.getpid(), self._descriptor, self._secret))
        finally:
            os.close(self._descriptor)

    def write(self, buffers: Sequence[Array]) -> None:
        """Copy contiguous arrays in, one after the other. Releases the GIL."""
        end = TENSORS_START
        for array in buffers:
            start, end = end, end + array.nbytes
            self._bytes[start:end] = array.reshape(-1).view(np.uint8)


@functools.lru_cache(maxsize=256)  # the same for every batch of a student
def point_to_region(header: bytes) -> bytes:
    """Return the JSON of a request with its binary tensors replaced by those in the region."""
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
