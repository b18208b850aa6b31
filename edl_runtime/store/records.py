"""What is kept in Redis as JSON, and may have been written by another version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from edl_runtime.decoding import Decoder
from edl_runtime.errors import MalformedRecordError

Record = TypeVar("Record")


def decoded(content: str | bytes | None, kind: type[Record]) -> Record | None:
    """Return what was kept; None if nothing was, and for what this version can't read."""
    if content is None:
        return None
    try:
        return Decoder(kind).decode(content)
    except msgspec.DecodeError:
        return None


@contextmanager
def has_to_be_readable(key: str) -> Iterator[None]:
    """Turn what the block raises about what `key` holds into a MalformedRecordError.

    That is a KeyError for a field that it lacks, a ValueError for what is no number, a msgspec.DecodeError.
    """
    try:
        yield
    except KeyError as error:
        raise MalformedRecordError(key, f"it lacks {error}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise MalformedRecordError(key, str(error)) from None
