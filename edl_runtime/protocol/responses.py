"""Answers of a model: made by a teacher, read by a student."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from edl_runtime.decoding import Decoder
from edl_runtime.errors import AnswerLimitError, ProtocolError
from edl_runtime.protocol.body import (
    JSON_LIMIT,
    Buffer,
    Parameters,
    TensorHead,
    array_of_json,
    check_payload,
    decode,
    padded,
    shaped,
)
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.requests import InferRequest
from edl_runtime.protocol.tensors import Array, datatype_of, dtype_of

_LEAST_NUMBER = 2  # bytes of a number in JSON, its comma included


class _Response(msgspec.Struct, omit_defaults=True):
    outputs: list[TensorHead]
    model_name: str = ""
    model_version: str = ""
    id: str = ""


_decoder = Decoder(_Response)
_encoder = msgspec.json.Encoder()


def open_response(header: Buffer, payload: int) -> tuple[dict[str, Array], list[Array]]:
    """Return the answered arrays by name, and those of them that the next `payload` bytes fill, in order.

    Arrays are fresh, writable and contiguous. Raises ProtocolError unless header and payload fit to the byte, before
    any array is made.
    """
    heads = decode(_decoder, header).outputs
    check_payload(heads, payload, "output")
    arrays: dict[str, Array] = {}
    unfilled: list[Array] = []
    for head in heads:
        if head.parameters.binary_data_size is None:
            array = array_of_json(head, "output")
        else:
            array = shaped("output", head, np.empty(math.prod(head.shape), dtype_of(head.datatype)))
            unfilled.append(array)
        if arrays.setdefault(head.name, array) is not array:
            raise ProtocolError(f"output {head.name!r} comes twice")
    return arrays, unfilled


def encode_response(
    signature: ModelSignature, request: InferRequest, outputs: Mapping[str, Array], into: memoryview
) -> tuple[int | None, int]:
    """Write the answer into `into`; return the JSON header's size (None if all is JSON) and the body's.

    Raises AnswerLimitError if it does not fit, ProtocolError for a dtype without a name in the protocol.
    """
    numbers = sum(outputs[name].size for name, binary in request.outputs.items() if not binary)
    _check_size(_LEAST_NUMBER * numbers, min(JSON_LIMIT, len(into)))  # before objects are made of them
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
    header = padded(_encoder.encode(_Response(heads, signature.name, version, request.id)))
    size = len(header) + sum(array.nbytes for array in buffers)
    _check_size(len(header), JSON_LIMIT)
    _check_size(size, len(into))
    into[: len(header)] = header
    end = len(header)
    for array in buffers:
        into[end : end + array.nbytes] = array.reshape(-1).view(np.uint8).data
        end += array.nbytes
    return (len(header) if buffers else None), size


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise AnswerLimitError(size, limit)
