"""What the bodies of requests and answers of the Open Inference Protocol v2 have in common.

A body is a JSON header, then the raw little-endian bytes of each binary tensor in the header's order (Triton's binary
tensor extension), or JSON alone with the numbers in it. All input from the network is checked before memory is
allocated for it; invalid input raises `ProtocolError` with the tensor's name and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.oip import Normalise
from edl_runtime.protocol.shared_memory import REGION_NAME
from edl_runtime.protocol.tensors import Array, dtype_of

_T = TypeVar("_T")
Buffer = bytes | memoryview

JSON_LIMIT = 64 * 1024 * 1024
"""Most bytes of JSON in a body: Python objects take many times their text, so larger tensors have to be binary."""

_MOST_AXES = 32
_ALIGNMENT = 64

_WHOLE: frozenset[type] = frozenset({int})
_NUMBERS: dict[str, frozenset[type]] = {"b": frozenset({bool}), "f": frozenset({int, float})}
"""The types in JSON for each kind of dtype; whole numbers for all others."""


class Parameters(msgspec.Struct, omit_defaults=True, frozen=True):
    """The parameters of a tensor, an output or a whole request: Triton's binary tensor extension and ours.

    - `binary_data_size`: bytes of a tensor after the JSON, None for one in the JSON.
    - `binary_data`: whether an output should be binary; None for the request's `binary_data_output`.
    - `binary_data_output`: whether all outputs of a request should be binary.
    - `top_k`: how many of an output's largest values are requested, None for all of it; see `oip.TopK`.
    - `normalise`: how to convert an input that comes as UINT8 to the model's FP32.
    - `shared_memory_region`, `shared_memory_offset`, `shared_memory_byte_size`: where an input is in shared memory.
    """

    binary_data_size: int | None = None
    binary_data: bool | None = None
    binary_data_output: bool = False
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    normalise: Normalise | None = None
    shared_memory_region: str | None = None
    shared_memory_offset: int = 0
    shared_memory_byte_size: int | None = None


class TensorHead(msgspec.Struct, omit_defaults=True):
    """A tensor in the JSON; `data` has its numbers unless they follow as binary."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Parameters = Parameters()
    data: Any = None


class EncodedRequest(NamedTuple):
    """A request to send: the JSON `header`, then `buffers`, `size` bytes in all. The response must have `outputs`."""

    header: bytes
    buffers: list[Array]
    size: int
    outputs: tuple[str, ...] = ()


def decode_header(decoder: JsonDecoder[_T], header: Buffer) -> _T:
    """Return the JSON header of a body. Raises ProtocolError."""
    if len(header) > JSON_LIMIT:
        raise ProtocolError(f"the JSON has {len(header)} bytes, allowed are {JSON_LIMIT}; send tensors as binary")
    try:
        return decoder.decode(header)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the JSON is invalid: {error}") from None


def check_payload(heads: Sequence[TensorHead], payload: int, kind: str, shared: int | None = None) -> None:
    """Raise ProtocolError unless binary tensors have the size of their shapes and fill `payload` bytes exactly.

    Those in shared memory have to be within its `shared` bytes, None where there is none. `kind` is "input" or
    "output", for messages.
    """
    total = 0
    for head in heads:
        if len(head.shape) > _MOST_AXES or any(not 0 <= axis < 2**62 for axis in head.shape):
            allowed = f"at most {_MOST_AXES} axes of 0 or more"
            raise ProtocolError(f"{kind} {head.name!r}: shape is {list(head.shape)}, allowed are {allowed}")
        if head.parameters.shared_memory_region is not None:
            _check_shared(head, kind, shared)
            continue
        size = head.parameters.binary_data_size
        if size is None:
            if head.data is None:
                raise ProtocolError(f"{kind} {head.name!r} has neither data nor parameters.binary_data_size")
            continue
        allowed_size = math.prod(head.shape) * dtype_of(head.datatype).itemsize
        if size != allowed_size or head.data is not None:
            fault = f"binary_data_size is {size}, its shape and datatype make {allowed_size}, and data must be absent"
            raise ProtocolError(f"{kind} {head.name!r}: {fault}")
        total += size
    if total != payload:
        raise ProtocolError(f"{payload} bytes follow the JSON, its {kind}s' binary_data_size make {total}")


def _check_shared(head: TensorHead, kind: str, shared: int | None) -> None:
    """Raise ProtocolError unless a tensor has the size of its shape and is within the shared memory."""
    given = head.parameters
    if shared is None or given.shared_memory_region != REGION_NAME:
        unknown = f"shared_memory_region {given.shared_memory_region!r}"
        fault = f"{unknown} is not registered through this connection, or could not be passed to the model"
        raise ProtocolError(f"{kind} {head.name!r}: {fault}")
    size = math.prod(head.shape) * dtype_of(head.datatype).itemsize
    if given.shared_memory_byte_size != size or given.binary_data_size is not None or head.data is not None:
        fault = f"shared_memory_byte_size is {given.shared_memory_byte_size}, its shape and datatype make {size}"
        raise ProtocolError(f"{kind} {head.name!r}: {fault}, and data must be absent")
    if not 0 <= given.shared_memory_offset <= shared - size:
        fault = f"shared_memory_offset is {given.shared_memory_offset}, the region has {shared} bytes"
        raise ProtocolError(f"{kind} {head.name!r}: {fault}, the tensor {size}")


def array_from_json(head: TensorHead, kind: str) -> Array:
    """Return the numbers of a JSON tensor, given flat or nested.

    Floating-point numbers are rounded to their datatype. Nothing else is converted: a number out of range is refused,
    and so is `true` in place of 1. Raises ProtocolError.
    """
    dtype = dtype_of(head.datatype)
    fault = f"{kind} {head.name!r}: data is not {head.datatype} numbers of shape {list(head.shape)}, flat or nested"
    if not isinstance(head.data, list):
        raise ProtocolError(fault)
    try:
        given = np.array(head.data, dtype=object)
    except (ValueError, RecursionError):  # too many axes
        raise ProtocolError(fault) from None
    numbers = given.ravel().tolist()
    allowed = _NUMBERS.get(dtype.kind, _WHOLE)
    if given.shape not in ((math.prod(head.shape),), head.shape) or not allowed.issuperset(map(type, numbers)):
        raise ProtocolError(fault)
    try:
        return reshaped(kind, head, _in_range(numbers, dtype))
    except OverflowError:
        raise ProtocolError(f"{fault}: a number is out of range") from None


def _in_range(numbers: list[Any], dtype: np.dtype[Any]) -> Array:
    """Return `numbers` as an array. Raises OverflowError for a number out of the range of `dtype`."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = np.array(numbers, np.float64).astype(dtype)
        if not np.isfinite(array).all():
            raise OverflowError
        return array
    if dtype.kind != "b" and numbers:
        limits = np.iinfo(dtype)  # numpy before 2 wraps around
        if min(numbers) < limits.min or max(numbers) > limits.max:
            raise OverflowError
    return np.array(numbers, dtype)


def reshaped(kind: str, head: TensorHead, array: Array) -> Array:
    """Return `array` in the shape of its head. Raises ProtocolError for a shape that numpy can't have."""
    try:
        return array.reshape(head.shape)
    except ValueError:
        raise ProtocolError(f"{kind} {head.name!r}: shape {list(head.shape)} is not possible") from None


def padded_header(header: bytes) -> bytes:
    """Return the JSON padded with blanks, so that the binary tensors after it are aligned."""
    return header + b" " * (-len(header) % _ALIGNMENT)
