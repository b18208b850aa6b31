"""What is kept in Redis as JSON, and may have been written by another version."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from edl_runtime.decoding import Decoder

Record = TypeVar("Record")


def decoded(content: str | bytes | None, kind: type[Record]) -> Record | None:
    """Return what was kept; None if nothing was, and for what this version can't read."""
    if content is None:
        return None
    try:
        return Decoder(kind).decode(content)
    except msgspec.DecodeError:
        return None
