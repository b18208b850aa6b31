"""Reading of files that others may write to, or replace by what never ends or never begins."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

from edl_runtime.errors import DamagedFileError

LIMIT = 1 << 26
"""Bytes of a file that describes something. A manifest of a million shards has half of them."""

_READ_AT_ONCE = 1 << 23


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, unbuffered.

    Raises DamagedFileError for a FIFO, a device, a folder or a link that leads to itself, and OSError.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise DamagedFileError("a link that leads to itself") from None
    if not stat.S_ISREG(mode):  # before it is opened: that alone has an effect on some devices
        raise DamagedFileError("not a regular file")
    return cast(BinaryIO, open(path, "rb", buffering=0, opener=_open_at_once))


def read_regular(path: Path, limit: int = LIMIT) -> bytes:
    """Return the content of a file. Raises as `open_regular`, and DamagedFileError for more than `limit` bytes."""
    with open_regular(path) as file:
        return read_all(file, limit)


def read_all(file: BinaryIO, limit: int = LIMIT) -> bytes:
    """Return the rest of an open file. Raises DamagedFileError for more than `limit` bytes."""
    content = bytearray()
    while more := file.read(min(limit + 1 - len(content), _READ_AT_ONCE)):
        content += more
        if len(content) > limit:
            raise DamagedFileError(f"more than {limit} bytes")
    return bytes(content)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # if it has just become a FIFO
