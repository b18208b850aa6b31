"""What is no file, in a file's place."""

from __future__ import annotations

import os
from pathlib import Path

SPECIAL = ("fifo", "device", "folder", "endless")
"""The last one is a regular file, of a size that no memory has."""


def put(kind: str, path: Path) -> None:
    """Put such a file at `path`, instead of the one there."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 42)
