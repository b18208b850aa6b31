"""Tensors as numpy has them and as the Open Inference Protocol v2 names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.oip import Datatype

Array = npt.NDArray[Any]
Tensor = Array | Sequence[Array]
"""An array, or a sequence of rows of one shape that is sent as one array."""

_DTYPES: dict[Datatype, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_DATATYPES: dict[np.dtype[Any], Datatype] = {dtype: datatype for datatype, dtype in _DTYPES.items()}


def datatype_of(dtype: np.dtype[Any]) -> Datatype:
    """Return the protocol's name of `dtype`. Raises ProtocolError."""
    datatype = _DATATYPES.get(dtype)
    if datatype is None:
        raise ProtocolError(f"dtype {dtype} can't be sent; allowed are {joined_names(_DATATYPES)}")
    return datatype


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return the numpy dtype of `datatype`. Raises ProtocolError."""
    dtype = _DTYPES.get(datatype)  # type: ignore[call-overload]  # any text from the network
    if dtype is None:
        raise ProtocolError(f"datatype {datatype!r} is not served; allowed are {joined_names(_DTYPES)}")
    return dtype  # type: ignore[no-any-return]


_PIECE = 1 << 16  # numbers, of which Python makes objects of 32 bytes


def array_of_list(numbers: Sequence[Any], dtype: np.dtype[Any]) -> Array:
    """Return the numbers of a protobuf list as an array; other threads run in between. Raises OverflowError."""
    array = np.empty(len(numbers), dtype)
    for start in range(0, len(numbers), _PIECE):
        array[start : start + _PIECE] = np.array(numbers[start : start + _PIECE], dtype)
    return array


def joined_names(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))
