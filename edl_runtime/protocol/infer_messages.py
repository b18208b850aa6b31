"""Inference requests and responses of the Open Inference Protocol v2: encoded and decoded.

A body is a JSON header, then the raw little-endian bytes of each binary tensor in the header's order (Triton's binary
tensor extension), or JSON alone with the numbers in it. All input from the network is checked before memory is
allocated for it; invalid input raises `ProtocolError` with the tensor's name and what is allowed.
"""

from __future__ import annotations

import functools
import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.errors import AnswerLimitError, ProtocolError
from edl_runtime.protocol.oip import ModelSignature, Normalise, TensorSpec, TopK, response_names, shape_fits
from edl_runtime.protocol.shared_memory import REGION_NAME
from edl_runtime.protocol.tensors import Array, Tensor, datatype_of, dtype_of, joined_names

_T = TypeVar("_T")
Buffer = bytes | memoryview

JSON_LIMIT = 64 * 1024 * 1024
"""Most bytes of JSON in a body: Python objects take many times their text, so larger tensors have to be binary."""

REQUEST_JSON_LIMIT = 8 * 1024 * 1024
"""Most bytes of JSON in a request, which a teacher parses in about a second; larger tensors have to be binary."""

MOST_AXES = 32
"""Most axes of a tensor, which every version of numpy has."""

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


# Ids, which tie an answer to its request


class RequestIds:
    """Makes the ids of one connection's requests: all are of one length, and no other connection has them."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count()

    def new(self) -> str:
        return f"{self._prefix}-{next(self._numbers) % (1 << 32):08x}"


def with_id(header: bytes, asked: str) -> bytes:
    """Return the JSON of a request that has no id with this one."""
    return padded_header(b'{"id":"%b",%b' % (asked.encode(), header[1:].rstrip(b" ")))


def check_id(asked: str, answered: object) -> None:
    """Raise ProtocolError for the id of an answer to another request. A server that keeps no ids answers none."""
    if answered and answered != asked:
        raise ProtocolError(f"the answer has id {answered!r}, allowed is {asked!r}: it is to another request")


# Checks of headers, and numbers in JSON


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
        if len(head.shape) > MOST_AXES or any(not 0 <= axis < 2**62 for axis in head.shape):
            allowed = f"at most {MOST_AXES} axes of 0 or more"
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


# Requests


class _RequestedOutput(msgspec.Struct, omit_defaults=True):
    name: str
    parameters: Parameters = Parameters()


class _Request(msgspec.Struct, omit_defaults=True):
    inputs: list[TensorHead]
    outputs: list[_RequestedOutput] = []
    id: str = ""
    parameters: Parameters = Parameters()


_request_decoder = JsonDecoder(_Request)
_json_encoder = msgspec.json.Encoder()
_AS_BINARY = Parameters(binary_data=True)
_ALL_AS_BINARY = Parameters(binary_data_output=True)


class InferRequest(NamedTuple):
    """A checked request.

    - `outputs`: the tensors of the answer in order, each with whether it is binary.
    - `requested`: the requested outputs that these answer.
    - `normalise`: the inputs that came as UINT8, and how to convert them to the model's FP32.
    """

    id: str
    inputs: dict[str, Array]
    outputs: dict[str, bool]
    requested: tuple[str | TopK, ...]
    normalise: dict[str, Normalise]


def encode_request(
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str | TopK],
    normalise: Mapping[str, Normalise] = MappingProxyType({}),
) -> EncodedRequest:
    """Return the body that requests `outputs` (empty: all of the model's), everything binary.

    `normalise` has the uint8 inputs, by name, that the teacher converts to the model's FP32.

    The buffers are the given arrays themselves wherever they are contiguous, so don't change them before they are
    sent. Raises ProtocolError for a dtype that the protocol does not have or that can't be normalised, and for rows of
    different dtypes or shapes.
    """
    tensors: list[_TensorLayout] = []
    buffers: list[Array] = []
    for name, tensor in inputs.items():
        rows, dtype, shape = _rows(name, tensor)
        how = normalise.get(name)
        if how is not None and dtype != np.uint8:
            raise ProtocolError(f"input {name!r} is {dtype}; an input to normalise has to be uint8")
        tensors.append(_TensorLayout(name, dtype, shape, how))
        buffers += rows
    header, size = _request_header(tuple(tensors), tuple(outputs))
    return EncodedRequest(header, buffers, size, _expected(tuple(outputs)))


@functools.lru_cache(maxsize=256)
def _expected(outputs: tuple[str | TopK, ...]) -> tuple[str, ...]:
    return tuple(name for output in outputs for name in response_names(output))


class _TensorLayout(NamedTuple):
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    normalise: Normalise | None

    def head(self) -> TensorHead:
        size = self.dtype.itemsize * math.prod(self.shape)
        parameters = Parameters(binary_data_size=size, normalise=self.normalise)
        return TensorHead(self.name, datatype_of(self.dtype), self.shape, parameters)


@functools.lru_cache(maxsize=256)  # the same for every batch of a student
def _request_header(tensors: tuple[_TensorLayout, ...], outputs: tuple[str | TopK, ...]) -> tuple[bytes, int]:
    """Return the JSON before these tensors, and the size of the whole body."""
    heads = [tensor.head() for tensor in tensors]
    requested = [_requested_output(output) for output in outputs]
    header = padded_header(
        _json_encoder.encode(_Request(heads, requested, parameters=Parameters() if requested else _ALL_AS_BINARY))
    )
    return header, len(header) + sum(head.parameters.binary_data_size or 0 for head in heads)


def _requested_output(output: str | TopK) -> _RequestedOutput:
    if isinstance(output, str):
        return _RequestedOutput(output, _AS_BINARY)
    return _RequestedOutput(output.name, Parameters(binary_data=True, top_k=output.k))


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
    rows = [row if row.flags.c_contiguous else np.ascontiguousarray(row) for row in tensor]
    return rows, dtype, (len(tensor), *row_shape)


def decode_request(
    body: memoryview, header_size: int | None, signature: ModelSignature, region: memoryview | None = None
) -> InferRequest:
    """Return a client's request to the model; arrays of binary tensors are read-only views into `body`.

    `header_size` is the length of the JSON before the binary tensors, None if there are none. `region` is the client's
    shared memory, if any; the client may change it at any time. Raises ProtocolError.
    """
    if header_size is not None and not 0 <= header_size <= len(body):
        raise ProtocolError(f"Inference-Header-Content-Length: got {header_size}, the body has {len(body)} bytes")
    end = len(body) if header_size is None else header_size
    request = decode_header(_request_decoder, body[:end])
    check_payload(request.inputs, len(body) - end, "input", None if region is None else len(region))
    known = {spec.name: spec for spec in signature.inputs}
    inputs: dict[str, Array] = {}
    normalise: dict[str, Normalise] = {}
    for head in request.inputs:
        spec = known.get(head.name)
        if spec is None:
            raise ProtocolError(f"input {head.name!r} is unknown; the model takes {joined_names(known)}")
        if head.name in inputs:
            raise ProtocolError(f"input {head.name!r} comes twice")
        _check_head(head, spec)
        if head.parameters.normalise is not None:
            normalise[head.name] = head.parameters.normalise
        size = head.parameters.binary_data_size
        if region is not None and head.parameters.shared_memory_region is not None:
            inputs[head.name] = _shared_view(head, region)
        elif size is None:
            inputs[head.name] = array_from_json(head, "input")
        else:
            inputs[head.name] = _view(head, body[end : end + size])
            end += size
    if missing := [name for name in known if name not in inputs]:
        raise ProtocolError(f"input {joined_names(missing)} is missing; the model takes {joined_names(known)}")
    return InferRequest(request.id, inputs, *_requested_outputs(request, signature), normalise)


def _requested_outputs(request: _Request, signature: ModelSignature) -> tuple[dict[str, bool], tuple[str | TopK, ...]]:
    """Return `outputs` and `requested` of an `InferRequest`."""
    known = {spec.name: spec for spec in signature.outputs}
    all_binary = request.parameters.binary_data_output
    if not request.outputs:
        return dict.fromkeys(known, all_binary), tuple(known)
    outputs: dict[str, bool] = {}
    requested: list[str | TopK] = []
    for given in request.outputs:
        spec = known.get(given.name)
        if spec is None:
            raise ProtocolError(f"output {given.name!r} is unknown; the model has {joined_names(known)}")
        output = given.name if given.parameters.top_k is None else _top_k(spec, given.parameters.top_k)
        binary = given.parameters.binary_data
        for name in response_names(output):
            if name in outputs:
                raise ProtocolError(f"output {name!r} is requested twice")
            outputs[name] = all_binary if binary is None else binary
        requested.append(output)
    return outputs, tuple(requested)


def _top_k(spec: TensorSpec, k: int) -> TopK:
    if len(spec.shape) < 2:
        raise ProtocolError(f"output {spec.name!r}: top_k needs an axis behind the batch, its shape is {spec.shape}")
    if 0 <= spec.shape[-1] < k:
        raise ProtocolError(f"output {spec.name!r}: top_k is {k}, allowed is at most {spec.shape[-1]}, its last axis")
    return TopK(spec.name, k)


def _check_head(head: TensorHead, spec: TensorSpec) -> None:
    how = head.parameters.normalise
    datatype = spec.datatype if how is None else "UINT8"
    if head.datatype != datatype or (how is not None and spec.datatype != "FP32"):
        takes = spec.datatype + (" or UINT8 to normalise" if spec.datatype == "FP32" else "")
        normalised = " to normalise" if how is not None else ""
        raise ProtocolError(f"input {head.name!r}: datatype is {head.datatype!r}{normalised}, the model takes {takes}")
    if not shape_fits(head.shape, spec.shape):
        given, allowed = list(head.shape), list(spec.shape)
        raise ProtocolError(f"input {head.name!r}: shape is {given}, the model takes {allowed} (-1 is any size)")
    if how is None:
        return
    if how.axis >= len(head.shape):
        raise ProtocolError(f"input {head.name!r}: normalise.axis is {how.axis}, allowed is below {len(head.shape)}")
    if how.channels not in (1, head.shape[how.axis]):
        channels = f"there are {head.shape[how.axis]} channels on axis {how.axis}"
        raise ProtocolError(f"input {head.name!r}: normalise has numbers for {how.channels} channels, {channels}")


def _shared_view(head: TensorHead, region: memoryview) -> Array:
    """Return an input in shared memory. Integers are copied: the client could change indices after they are checked."""
    given = head.parameters
    start = given.shared_memory_offset
    array = _view(head, region[start : start + (given.shared_memory_byte_size or 0)])
    return array if array.dtype.kind == "f" or given.normalise is not None else array.copy()


def _view(head: TensorHead, data: memoryview) -> Array:
    array = np.frombuffer(data, dtype_of(head.datatype))
    array.flags.writeable = False
    return reshaped("input", head, array if array.flags.aligned else array.copy())


# Responses

_LEAST_NUMBER = 2  # bytes of a number in JSON, its comma included


class _Response(msgspec.Struct, omit_defaults=True):
    outputs: list[TensorHead]
    model_name: str = ""
    model_version: str = ""
    id: str = ""


class _ReceivedTensor(msgspec.Struct):
    """As `TensorHead`; some servers send null for what they have not."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Parameters | None = None
    data: Any = None

    def head(self) -> TensorHead:
        return TensorHead(self.name, self.datatype, self.shape, self.parameters or Parameters(), self.data)


class _ReceivedResponse(msgspec.Struct):
    outputs: list[_ReceivedTensor]
    id: Any = None


_response_decoder = JsonDecoder(_ReceivedResponse)


def decode_response(header: Buffer, payload: int, asked: str = "") -> tuple[dict[str, Array], list[Array]]:
    """Return the answer's arrays by name, and those of them that the next `payload` bytes fill, in order.

    Arrays are new, writable and contiguous. Raises ProtocolError, before it makes any array, unless header and payload
    match to the byte, and the answer is to the request with the id `asked`, if it had one.
    """
    response = decode_header(_response_decoder, header)
    if asked:
        check_id(asked, response.id)
    heads = [tensor.head() for tensor in response.outputs]
    check_payload(heads, payload, "output")
    arrays: dict[str, Array] = {}
    unfilled: list[Array] = []
    for head in heads:
        if head.parameters.binary_data_size is None:
            array = array_from_json(head, "output")
        else:
            array = reshaped("output", head, np.empty(math.prod(head.shape), dtype_of(head.datatype)))
            unfilled.append(array)
        if arrays.setdefault(head.name, array) is not array:
            raise ProtocolError(f"output {head.name!r} comes twice")
    return arrays, unfilled


def encode_response(
    signature: ModelSignature, request: InferRequest, outputs: Mapping[str, Array], into: memoryview
) -> tuple[int | None, int]:
    """Write the answer into `into`; return the JSON header's size (None if all is JSON) and the body's.

    Raises AnswerLimitError if it does not fit, ProtocolError for a dtype that the protocol does not have.
    """
    numbers = sum(outputs[name].size for name, binary in request.outputs.items() if not binary)
    check_size(_LEAST_NUMBER * numbers, min(JSON_LIMIT, len(into)))  # before objects are made of them
    heads, buffers = [], []
    for name, binary in request.outputs.items():
        array = outputs[name]
        head = TensorHead(name, datatype_of(array.dtype), array.shape)
        if binary:
            head.parameters = Parameters(binary_data_size=array.nbytes)
            buffers.append(np.ascontiguousarray(array))
        else:
            head.data = array.ravel().tolist()
        heads.append(head)
    version = signature.versions[0] if signature.versions else ""
    header = padded_header(_json_encoder.encode(_Response(heads, signature.name, version, request.id)))
    size = len(header) + sum(array.nbytes for array in buffers)
    check_size(len(header), JSON_LIMIT)
    check_size(size, len(into))
    into[: len(header)] = header
    end = len(header)
    for array in buffers:
        into[end : end + array.nbytes] = array.reshape(-1).view(np.uint8).data
        end += array.nbytes
    return (len(header) if buffers else None), size


def check_size(size: int, limit: int) -> None:
    """Raise AnswerLimitError for an answer of more bytes than the limit."""
    if size > limit:
        raise AnswerLimitError(size, limit)
