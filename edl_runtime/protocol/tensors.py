"""numpy arrays to and from the bodies of the Open Inference Protocol v2.

A body is a JSON header, then the raw little-endian bytes of each binary tensor in the header's order (Triton's binary
tensor extension), or JSON alone with the numbers in it. Everything that comes from the network is checked before
memory is taken for it; what does not add up raises `ProtocolError` naming the tensor and what is allowed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from edl_runtime.errors import ProtocolError
from edl_runtime.protocol.oip import Datatype, ModelSignature, TensorSpec

Array = npt.NDArray[Any]
Tensor = Array | Sequence[Array]
"""An array, or a sequence of equally shaped rows that travels as one array."""

_T = TypeVar("_T")
Buffer = bytes | memoryview

JSON_LIMIT = 64 * 1024 * 1024
"""Most bytes of JSON in a body: Python objects take many times their text, so larger tensors come as binary."""

_MOST_AXES = 32
_ALIGNMENT = 64
_KEPT_HEADER = 4096  # bytes; longer ones have numbers in them and are never alike
_SMALL_ROW = 1024  # bytes; copying such rows into one array is cheaper than a pointer to each

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
        raise ProtocolError(f"dtype {dtype} can't be sent; allowed are {_listed(_DATATYPES)}")
    return datatype


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return the numpy dtype of `datatype`. Raises ProtocolError."""
    dtype = _DTYPES.get(datatype)  # type: ignore[call-overload]  # any text may come from the network
    if dtype is None:
        raise ProtocolError(f"datatype {datatype!r} is not served; allowed are {_listed(_DTYPES)}")
    return dtype  # type: ignore[no-any-return]


class _Parameters(msgspec.Struct, omit_defaults=True, frozen=True):
    binary_data_size: int | None = None
    binary_data: bool | None = None
    binary_data_output: bool = False


class _TensorHead(msgspec.Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: _Parameters = _Parameters()
    data: Any = None


class _OutputWish(msgspec.Struct, omit_defaults=True):
    name: str
    parameters: _Parameters = _Parameters()


class _Request(msgspec.Struct, omit_defaults=True):
    inputs: list[_TensorHead]
    outputs: list[_OutputWish] = []
    id: str = ""
    parameters: _Parameters = _Parameters()


class _Response(msgspec.Struct, omit_defaults=True):
    outputs: list[_TensorHead]
    model_name: str = ""
    model_version: str = ""
    id: str = ""


_request_decoder = msgspec.json.Decoder(_Request)
_response_decoder = msgspec.json.Decoder(_Response)
_encoder = msgspec.json.Encoder()
_AS_BINARY = _Parameters(binary_data=True)
_ALL_AS_BINARY = _Parameters(binary_data_output=True)


class Encoded(NamedTuple):
    """A body ready to send: the JSON `header`, then `buffers`, `size` bytes in all."""

    header: bytes
    buffers: list[Array]
    size: int


class InferRequest(NamedTuple):
    """A checked request. `outputs` are the wanted outputs in order, each with whether it goes back as binary."""

    id: str
    inputs: dict[str, Array]
    outputs: dict[str, bool]


def encode_request(inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> Encoded:
    """Return the body that asks for `outputs` (empty: all of the model's), everything binary.

    The buffers are the given arrays themselves wherever they are contiguous, so don't change them before they are
    sent. Raises ProtocolError for a dtype without a name in the protocol and for rows that differ.
    """
    tensors: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
    buffers: list[Array] = []
    for name, tensor in inputs.items():
        rows, dtype, shape = _rows(name, tensor)
        tensors.append((name, dtype, shape))
        buffers += rows
    header, size = _request_header(tuple(tensors), tuple(outputs))
    return Encoded(header, buffers, size)


@functools.lru_cache(maxsize=256)  # a student asks the same for every batch
def _request_header(
    tensors: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...], outputs: tuple[str, ...]
) -> tuple[bytes, int]:
    """Return the JSON before these tensors, and the size of the whole body."""
    heads = [
        _TensorHead(name, datatype_of(dtype), shape, _Parameters(binary_data_size=dtype.itemsize * math.prod(shape)))
        for name, dtype, shape in tensors
    ]
    wishes = [_OutputWish(name, _AS_BINARY) for name in outputs]
    header = _padded(_encoder.encode(_Request(heads, wishes, parameters=_Parameters() if wishes else _ALL_AS_BINARY)))
    return header, len(header) + sum(head.parameters.binary_data_size or 0 for head in heads)


def _rows(name: str, tensor: Tensor) -> tuple[list[Array], np.dtype[Any], tuple[int, ...]]:
    if isinstance(tensor, np.ndarray):
        return [np.ascontiguousarray(tensor)], tensor.dtype, tensor.shape
    if not tensor:
        raise ProtocolError(f"input {name!r}: got no rows, allowed is one or more")
    first = tensor[0]
    dtype, row_shape = first.dtype, first.shape
    for number, row in enumerate(tensor):
        if row.shape != row_shape or row.dtype != dtype:
            given, allowed = f"{row.dtype}{list(row.shape)}", f"{dtype}{list(row_shape)} as in row 0"
            raise ProtocolError(f"input {name!r}: row {number} is {given}, allowed is {allowed}")
    shape = (len(tensor), *row_shape)
    if first.nbytes < _SMALL_ROW:
        return [np.stack(tensor)], dtype, shape
    return [row if row.flags.c_contiguous else np.ascontiguousarray(row) for row in tensor], dtype, shape


def open_response(header: Buffer, payload: int) -> tuple[dict[str, Array], list[Array]]:
    """Return the answered arrays by name, and those of them that the next `payload` bytes fill, in order.

    Arrays are fresh, writable and contiguous. Raises ProtocolError unless header and payload fit to the byte, before
    any array is made.
    """
    if len(header) <= _KEPT_HEADER:
        heads = _response_heads(bytes(header), payload)
    else:
        heads = _read_response_heads(header, payload)
    arrays: dict[str, Array] = {}
    unfilled: list[Array] = []
    for head in heads:
        if head.parameters.binary_data_size is None:
            array = _array_of_json(head, "output")
        else:
            array = _shaped("output", head, np.empty(math.prod(head.shape), dtype_of(head.datatype)))
            unfilled.append(array)
        if arrays.setdefault(head.name, array) is not array:
            raise ProtocolError(f"output {head.name!r} comes twice")
    return arrays, unfilled


def _read_response_heads(header: Buffer, payload: int) -> list[_TensorHead]:
    heads = _decode(_response_decoder, header).outputs
    _check_payload(heads, payload, "output")
    return heads


@functools.lru_cache(maxsize=64)  # a teacher answers the same for every batch, but for the numbers behind it
def _response_heads(header: bytes, payload: int) -> list[_TensorHead]:
    return _read_response_heads(header, payload)


def decode_request(body: memoryview, header_size: int | None, signature: ModelSignature) -> InferRequest:
    """Return what a client asks of the model; arrays of binary tensors are read-only views into `body`.

    `header_size` is the length of the JSON before the binary tensors, None if there are none. Raises ProtocolError.
    """
    if header_size is not None and not 0 <= header_size <= len(body):
        raise ProtocolError(f"Inference-Header-Content-Length: got {header_size}, the body has {len(body)} bytes")
    end = len(body) if header_size is None else header_size
    request = _decode(_request_decoder, body[:end])
    _check_payload(request.inputs, len(body) - end, "input")
    known = {spec.name: spec for spec in signature.inputs}
    inputs: dict[str, Array] = {}
    for head in request.inputs:
        spec = known.get(head.name)
        if spec is None:
            raise ProtocolError(f"input {head.name!r} is unknown; the model takes {_listed(known)}")
        if head.name in inputs:
            raise ProtocolError(f"input {head.name!r} comes twice")
        _check_head(head, spec)
        size = head.parameters.binary_data_size
        if size is None:
            inputs[head.name] = _array_of_json(head, "input")
        else:
            inputs[head.name] = _view(head, body[end : end + size])
            end += size
    if missing := [name for name in known if name not in inputs]:
        raise ProtocolError(f"input {_listed(missing)} is missing; the model takes {_listed(known)}")
    return InferRequest(request.id, inputs, _wanted(request, signature))


def encode_response(
    signature: ModelSignature, request: InferRequest, outputs: Mapping[str, Array], into: memoryview
) -> tuple[int | None, int]:
    """Write the answer into `into`; return the JSON header's size (None if all is JSON) and the body's.

    Raises ProtocolError if it does not fit.
    """
    heads, buffers = [], []
    for name, binary in request.outputs.items():
        array = outputs[name]
        head = _TensorHead(name, datatype_of(array.dtype), array.shape)
        if binary:
            head.parameters = _Parameters(binary_data_size=array.nbytes)
            buffers.append(np.ascontiguousarray(array))
        else:
            head.data = array.ravel().tolist()
        heads.append(head)
    version = signature.versions[0] if signature.versions else ""
    header = _padded(_encoder.encode(_Response(heads, signature.name, version, request.id)))
    size = len(header) + sum(array.nbytes for array in buffers)
    if size > len(into):
        raise ProtocolError(f"the answer has {size} bytes, allowed are {len(into)}; ask for fewer rows or outputs")
    into[: len(header)] = header
    end = len(header)
    for array in buffers:
        into[end : end + array.nbytes] = array.reshape(-1).view(np.uint8).data
        end += array.nbytes
    return (len(header) if buffers else None), size


def _wanted(request: _Request, signature: ModelSignature) -> dict[str, bool]:
    known = [spec.name for spec in signature.outputs]
    all_binary = request.parameters.binary_data_output
    if not request.outputs:
        return dict.fromkeys(known, all_binary)
    wanted: dict[str, bool] = {}
    for wish in request.outputs:
        if wish.name not in known:
            raise ProtocolError(f"output {wish.name!r} is unknown; the model has {_listed(known)}")
        binary = wish.parameters.binary_data
        wanted[wish.name] = all_binary if binary is None else binary
    return wanted


def _decode(decoder: msgspec.json.Decoder[_T], header: Buffer) -> _T:
    if len(header) > JSON_LIMIT:
        raise ProtocolError(f"the JSON has {len(header)} bytes, allowed are {JSON_LIMIT}; send tensors as binary")
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the JSON is not what the protocol allows: {error}") from None


def _check_payload(heads: Sequence[_TensorHead], payload: int, kind: str) -> None:
    """Check that binary tensors have the size of their shapes and fill `payload` to the byte."""
    total = 0
    for head in heads:
        if len(head.shape) > _MOST_AXES or any(not 0 <= axis < 2**62 for axis in head.shape):
            allowed = f"at most {_MOST_AXES} axes of 0 or more"
            raise ProtocolError(f"{kind} {head.name!r}: shape is {list(head.shape)}, allowed are {allowed}")
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


def _check_head(head: _TensorHead, spec: TensorSpec) -> None:
    if head.datatype != spec.datatype:
        raise ProtocolError(f"input {head.name!r}: datatype is {head.datatype!r}, the model takes {spec.datatype}")
    fits = len(head.shape) == len(spec.shape) and all(
        allowed in (given, -1) for given, allowed in zip(head.shape, spec.shape, strict=True)
    )
    if not fits:
        given, allowed = list(head.shape), list(spec.shape)
        raise ProtocolError(f"input {head.name!r}: shape is {given}, the model takes {allowed} (-1 is any size)")


def _view(head: _TensorHead, data: memoryview) -> Array:
    array = np.frombuffer(data, dtype_of(head.datatype))
    array.flags.writeable = False
    return _shaped("input", head, array if array.flags.aligned else array.copy())


def _array_of_json(head: _TensorHead, kind: str) -> Array:
    """Return the numbers of a JSON tensor, given flat or nested. Nothing is rounded or cut off silently."""
    dtype = dtype_of(head.datatype)
    fault = f"{kind} {head.name!r}: data is not {head.datatype} numbers of shape {list(head.shape)}, flat or nested"
    try:
        natural = np.array(head.data) if head.data else np.array([], dtype)
    except (ValueError, OverflowError, RecursionError):
        raise ProtocolError(fault) from None
    allowed_kinds = {"b": "b", "f": "fiu"}.get(dtype.kind, "iu")
    if natural.dtype.kind not in allowed_kinds or natural.shape not in ((math.prod(head.shape),), head.shape):
        raise ProtocolError(fault)
    if dtype.kind in "iu" and natural.size:
        limits = np.iinfo(dtype)
        if int(natural.min()) < limits.min or int(natural.max()) > limits.max:
            raise ProtocolError(f"{fault}: a number is outside {limits.min} to {limits.max}")
    with np.errstate(over="ignore"):
        return _shaped(kind, head, natural.astype(dtype))


def _shaped(kind: str, head: _TensorHead, array: Array) -> Array:
    try:
        return array.reshape(head.shape)
    except ValueError:
        raise ProtocolError(f"{kind} {head.name!r}: shape {list(head.shape)} is not possible") from None


def _padded(header: bytes) -> bytes:
    """Return the JSON with blanks at its end, so that the binary tensors behind it are aligned."""
    return header + b" " * (-len(header) % _ALIGNMENT)


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))
