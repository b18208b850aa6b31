"""Requests to a model: made by a student, read by a teacher."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edl_runtime.errors import ProtocolError
from edl_runtime.protocol.body import (
    Encoded,
    Parameters,
    TensorHead,
    array_of_json,
    check_payload,
    decode,
    padded,
    shaped,
)
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.protocol.tensors import Array, Tensor, datatype_of, dtype_of, listed


class _OutputWish(msgspec.Struct, omit_defaults=True):
    name: str
    parameters: Parameters = Parameters()


class _Request(msgspec.Struct, omit_defaults=True):
    inputs: list[TensorHead]
    outputs: list[_OutputWish] = []
    id: str = ""
    parameters: Parameters = Parameters()


_decoder = msgspec.json.Decoder(_Request)
_encoder = msgspec.json.Encoder()
_AS_BINARY = Parameters(binary_data=True)
_ALL_AS_BINARY = Parameters(binary_data_output=True)


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
        TensorHead(name, datatype_of(dtype), shape, Parameters(binary_data_size=dtype.itemsize * math.prod(shape)))
        for name, dtype, shape in tensors
    ]
    wishes = [_OutputWish(name, _AS_BINARY) for name in outputs]
    header = padded(_encoder.encode(_Request(heads, wishes, parameters=Parameters() if wishes else _ALL_AS_BINARY)))
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
    rows = [row if row.flags.c_contiguous else np.ascontiguousarray(row) for row in tensor]
    return rows, dtype, (len(tensor), *row_shape)


def decode_request(body: memoryview, header_size: int | None, signature: ModelSignature) -> InferRequest:
    """Return what a client asks of the model; arrays of binary tensors are read-only views into `body`.

    `header_size` is the length of the JSON before the binary tensors, None if there are none. Raises ProtocolError.
    """
    if header_size is not None and not 0 <= header_size <= len(body):
        raise ProtocolError(f"Inference-Header-Content-Length: got {header_size}, the body has {len(body)} bytes")
    end = len(body) if header_size is None else header_size
    request = decode(_decoder, body[:end])
    check_payload(request.inputs, len(body) - end, "input")
    known = {spec.name: spec for spec in signature.inputs}
    inputs: dict[str, Array] = {}
    for head in request.inputs:
        spec = known.get(head.name)
        if spec is None:
            raise ProtocolError(f"input {head.name!r} is unknown; the model takes {listed(known)}")
        if head.name in inputs:
            raise ProtocolError(f"input {head.name!r} comes twice")
        _check_head(head, spec)
        size = head.parameters.binary_data_size
        if size is None:
            inputs[head.name] = array_of_json(head, "input")
        else:
            inputs[head.name] = _view(head, body[end : end + size])
            end += size
    if missing := [name for name in known if name not in inputs]:
        raise ProtocolError(f"input {listed(missing)} is missing; the model takes {listed(known)}")
    return InferRequest(request.id, inputs, _wanted(request, signature))


def _wanted(request: _Request, signature: ModelSignature) -> dict[str, bool]:
    known = [spec.name for spec in signature.outputs]
    all_binary = request.parameters.binary_data_output
    if not request.outputs:
        return dict.fromkeys(known, all_binary)
    wanted: dict[str, bool] = {}
    for wish in request.outputs:
        if wish.name not in known:
            raise ProtocolError(f"output {wish.name!r} is unknown; the model has {listed(known)}")
        binary = wish.parameters.binary_data
        wanted[wish.name] = all_binary if binary is None else binary
    return wanted


def _check_head(head: TensorHead, spec: TensorSpec) -> None:
    if head.datatype != spec.datatype:
        raise ProtocolError(f"input {head.name!r}: datatype is {head.datatype!r}, the model takes {spec.datatype}")
    fits = len(head.shape) == len(spec.shape) and all(
        allowed in (given, -1) for given, allowed in zip(head.shape, spec.shape, strict=True)
    )
    if not fits:
        given, allowed = list(head.shape), list(spec.shape)
        raise ProtocolError(f"input {head.name!r}: shape is {given}, the model takes {allowed} (-1 is any size)")


def _view(head: TensorHead, data: memoryview) -> Array:
    array = np.frombuffer(data, dtype_of(head.datatype))
    array.flags.writeable = False
    return shaped("input", head, array if array.flags.aligned else array.copy())
