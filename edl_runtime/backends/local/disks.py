"""Which folder is meant where the system says only that no space is left."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

NO_SPACE = os.strerror(errno.ENOSPC)

FULL_BELOW = 1 << 20
"""Bytes: a disk that has less is full."""


def full_folders(folders: Iterable[Path]) -> list[str]:
    """Return which of these folders lie on a full disk, each once."""
    found = []
    for folder in folders:
        with suppress(OSError):  # it is not there
            if shutil.disk_usage(folder).free < FULL_BELOW:
                found.append(str(folder))
    return list(dict.fromkeys(found))


def with_folder(reason: str, folder: Path) -> str:
    """Return the reason of a failure in `folder`, with its path where that is what matters and is not said."""
    return f"{reason}: {folder}" if NO_SPACE in reason and str(folder) not in reason else reason
