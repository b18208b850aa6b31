"""Arrays to a safetensors file and back, without a copy of them in between.

The format is eight bytes with the header's length, the header (JSON: type, shape and offsets of each array) and the
arrays' bytes one after the other. Any safetensors library reads these files, and files of others are read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from edl_runtime.errors import SpecError

_METADATA = "__metadata__"
_TYPES = {
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
    "C64": "<c8",
    "F32": "<f4",
    "I32": "<i4",
    "U32": "<u4",
    "F16": "<f2",
    "I16": "<i2",
    "U16": "<u2",
    "BOOL": "|b1",
    "I8": "|i1",
    "U8": "|u1",
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_TYPES["BF16"] = "<u2"  # numpy has no such type; these are its bits, as Paddle gives and takes them


def pieces(arrays: Mapping[str, np.ndarray]) -> Iterator[memoryview]:
    """Yield the file's bytes: the header, and each array's own memory. Raises SpecError for other types of arrays."""
    if _METADATA in arrays:
        raise SpecError("checkpoint's array", _METADATA, "any other name: safetensors keeps this one for itself")
    entries: dict[str, Any] = {}
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # so that all are aligned
    end = 0
    for name, array in ordered:
        begin, end = end, end + array.nbytes
        entries[name] = {"dtype": _type_of(name, array), "shape": array.shape, "data_offsets": (begin, end)}
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for _, array in ordered:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def check_types(arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Raise SpecError that names the first of these arrays, with their names, that no such file can hold."""
    for name, array in arrays:
        _type_of(name, array)


def parse(content: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays in a file's bytes, as views of them. Raises ValueError for what is no safetensors file."""
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = msgspec.json.decode(content[8:start].tobytes(), type=dict[str, Any])
    header.pop(_METADATA, None)
    entries = msgspec.convert(header, dict[str, _Entry])
    return {name: _view(content[start:], entry) for name, entry in entries.items()}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _view(content: np.ndarray, entry: _Entry) -> np.ndarray:
    begin, end = entry.data_offsets
    if entry.dtype not in _TYPES:
        raise ValueError(f"arrays of type {entry.dtype}, known are {', '.join(_TYPES)}")
    return content[begin:end].view(_TYPES[entry.dtype]).reshape(entry.shape)


def _type_of(name: str, array: np.ndarray) -> str:
    try:
        return _NAMES[array.dtype.str]
    except KeyError:
        allowed = f"{', '.join(np.dtype(dtype).name for dtype in _NAMES)}: checkpoints hold no other types"
        raise SpecError(f"checkpoint's {name!r}", str(array.dtype), allowed) from None
