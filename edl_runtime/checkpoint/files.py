"""Files with a check sum, computed in passing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from io import RawIOBase
from typing import BinaryIO, cast

import numpy as np

from edl_runtime.checkpoint.manifest import FileRecord
from edl_runtime.checkpoint.trying import patiently

AT_ONCE = 1 << 20
"""Bytes that are summed and written while they are in the processor's cache; Python's lock is free meanwhile."""


def write_checked(
    file: BinaryIO, pieces: Iterable[memoryview], answered: Callable[[], None] = lambda: None
) -> FileRecord:
    """Write these to a file, one after the other; return what it must be from now on.

    `answered` is called after each part of them that is written.
    """
    size = crc32 = 0
    for piece in pieces:
        for begin in range(0, len(piece), AT_ONCE):
            chunk = piece[begin : begin + AT_ONCE]
            crc32 = zlib.crc32(chunk, crc32)
            file.write(chunk)
            answered()
        size += len(piece)
    return FileRecord(size, crc32)


def read_checked(
    file: BinaryIO, record: FileRecord, *, keep: bool = True, answered: Callable[[], None] = lambda: None
) -> np.ndarray:
    """Return a file's bytes, only its last ones unless they are to be kept. `answered` is called after each piece.

    A piece that can't be had is asked for again: however long a file takes to read, it is begun once. Raises ValueError
    if the bytes are not what was written.
    """
    room = np.empty(record.size if keep else min(record.size, 8 * AT_ONCE), np.uint8)
    crc32 = done = 0
    while done < record.size:
        begin = done if keep else 0
        chunk = room[begin : begin + min(8 * AT_ONCE, record.size - done)]
        count = patiently(cast(RawIOBase, file).readinto, chunk.data)
        if not count:
            raise ValueError(f"{done} bytes of {record.size}")
        answered()
        crc32 = zlib.crc32(chunk[:count].data, crc32)
        done += count
    if file.read(1):
        raise ValueError(f"more than {record.size} bytes")
    if crc32 != record.crc32:
        raise ValueError("other content than was written")
    return room
