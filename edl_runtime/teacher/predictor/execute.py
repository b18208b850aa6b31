"""The steps of a request: decode, join inputs, run the model, select outputs, encode the answer."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from edl_runtime.log import get_logger
from edl_runtime.protocol.errors import AnswerLimitError, ProtocolError
from edl_runtime.protocol.infer_messages import InferRequest, decode_request, encode_response
from edl_runtime.protocol.oip import JOIN_EXTENSION, ModelSignature, Normalise, TensorSpec, TopK, response_names
from edl_runtime.protocol.tensors import Array, dtype_of
from edl_runtime.teacher.models.model import Model

log = get_logger(__name__)


def with_extensions(signature: ModelSignature, *, joins: bool = False) -> ModelSignature:
    """Return `signature` with the extensions that its model supports. `joins`: requests may be joined."""
    can = {
        "top_k": any(len(spec.shape) > 1 for spec in signature.outputs),
        "normalise": any(spec.datatype == "FP32" and len(spec.shape) > 1 for spec in signature.inputs),
        JOIN_EXTENSION: joins and can_join(signature),
    }
    able = (name for name, able in can.items() if able)
    return msgspec.structs.replace(signature, extensions=(*able, *signature.extensions))


class EncodedAnswer(NamedTuple):
    """An answer: the first `size` bytes of its area, of which `json_size` are JSON (None: all).

    `predictor_died`: it died while it worked on this request.
    """

    status: int
    json_size: int | None
    size: int
    predictor_died: bool = False


def decode_or_refuse(
    signature: ModelSignature, body: memoryview, json_size: int | None, into: memoryview, region: memoryview | None
) -> InferRequest | EncodedAnswer:
    """Return the request in `body`, or the answer to an invalid one. `region`: the client's shared memory, if any."""
    try:
        return decode_request(body, json_size, signature, region)
    except ProtocolError as error:
        return encode_refusal(into, 400, str(error))


def run_alone(model: Model, request: InferRequest, into: memoryview) -> EncodedAnswer:
    """Run the model for one request and answer it, with status 500 when the model fails."""
    try:
        outputs = model.run(joined_inputs([request], model.signature), needed_outputs([request]))
        return encode_answer(model.signature, request, outputs, into)
    except Exception as error:  # noqa: BLE001 - the model's
        # Not `log.exception`: with rich installed, that takes a second and logs local variables, students' data too.
        log.error("model.failed", model=model.signature.name, exception=_encodable(traceback.format_exc()))  # noqa: TRY400
        return encode_refusal(into, 500, f"the model failed: {type(error).__name__}: {error}")


def encode_answer(
    signature: ModelSignature, request: InferRequest, outputs: Mapping[str, Array], into: memoryview
) -> EncodedAnswer:
    """Encode the model's `outputs` as the answer. Raises KeyError or the like when one is missing."""
    try:
        tensors = _requested_tensors(request, outputs)
    except ProtocolError as error:
        return encode_refusal(into, 400, str(error))
    try:
        return EncodedAnswer(200, *encode_response(signature, request, tensors, into))
    except AnswerLimitError as error:  # not 5xx: another teacher's answer would be as large
        return encode_refusal(into, 413, str(error))


def _requested_tensors(request: InferRequest, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors of the answer. Raises ProtocolError when they can't have the requested form."""
    tensors = select_outputs(outputs, request.requested)
    for name, binary in request.outputs.items():
        if not binary and tensors[name].dtype.kind == "f" and not np.isfinite(tensors[name]).all():
            raise ProtocolError(f"output {name!r} has NaN or infinite numbers, which JSON lacks; request it as binary")
    return tensors


def encode_refusal(into: memoryview, status: int, reason: str) -> EncodedAnswer:
    """Write an error into the area `into`."""
    body = msgspec.json.encode({"error": _encodable(reason[:4000])})
    into[: len(body)] = body
    return EncodedAnswer(status, None, len(body))


def _encodable(text: str) -> str:
    """Return `text` with surrogates replaced, which names of files may have: UTF-8 can't encode them."""
    return text.encode("utf-8", "replace").decode()


# Inputs and outputs of several requests


def can_join(signature: ModelSignature) -> bool:
    """Whether all inputs and outputs have a free batch axis."""
    tensors = [*signature.inputs, *signature.outputs]
    return bool(signature.inputs) and all(spec.shape[:1] == (-1,) for spec in tensors)


def needed_outputs(requests: Iterable[InferRequest]) -> list[str]:
    """Return the names of the model's outputs that these requests use."""
    requested = (one for request in requests for one in request.requested)
    return list(dict.fromkeys(one if isinstance(one, str) else one.name for one in requested))


def joined_inputs(requests: Sequence[InferRequest], signature: ModelSignature) -> dict[str, Array]:
    """Return the inputs of these requests, joined along the batch axis and read-only; a single one is not copied."""
    inputs = {spec.name: _joined_input(requests, spec) for spec in signature.inputs}
    for array in inputs.values():
        array.flags.writeable = False
    return inputs


def _joined_input(requests: Sequence[InferRequest], spec: TensorSpec) -> Array:
    arrays = [request.inputs[spec.name] for request in requests]
    first = arrays[0]
    if len(requests) == 1 and spec.name not in requests[0].normalise:
        return first
    whole = np.empty((sum(len(array) for array in arrays), *first.shape[1:]), dtype_of(spec.datatype))
    start = 0
    for request, array in zip(requests, arrays, strict=True):
        part = whole[start : start + len(array)]
        how = request.normalise.get(spec.name)
        if how is None:
            part[...] = array
        else:
            normalise(array, how, out=part)
        start += len(array)
    return whole


def split_outputs(outputs: Mapping[str, Array], rows: Sequence[int]) -> list[dict[str, Array]]:
    """Return each request's part of a joined run's outputs. Raises ValueError for an output without all rows."""
    total = sum(rows)
    for name, array in outputs.items():
        if not array.ndim or len(array) != total:
            raise ValueError(f"output {name!r} has shape {list(array.shape)} for {total} rows")
    parts = []
    start = 0
    for size in rows:
        parts.append({name: array[start : start + size] for name, array in outputs.items()})
        start += size
    return parts


# Requested outputs


def select_outputs(outputs: Mapping[str, Array], requested: Iterable[str | TopK]) -> dict[str, Array]:
    """Return the requested tensors by their names in the answer.

    Raises ProtocolError for a top-k larger than the output, KeyError for an output that the model did not return.
    """
    tensors: dict[str, Array] = {}
    for one in requested:
        if isinstance(one, str):
            tensors[one] = np.asarray(outputs[one])
            continue
        try:
            largest = top_k(np.asarray(outputs[one.name]), one.k)
        except ProtocolError as error:
            raise ProtocolError(f"output {one.name!r}: {error}") from None
        tensors.update(zip(response_names(one), largest, strict=True))
    return tensors


def top_k(array: Array, k: int) -> tuple[Array, Array]:
    """Return the `k` largest along the last axis, largest first (NaN before all), and their indices, as int32.

    The choice among equal ones is undefined. Raises ProtocolError when there are fewer than `k`.
    """
    size = array.shape[-1] if array.ndim > 1 else 0
    if k > size:
        raise ProtocolError(f"top_k is {k}, allowed is at most {size}, the last axis of {list(array.shape)}")
    flat = array.reshape(-1, size)
    row = np.arange(len(flat))[:, None]
    indices = np.argpartition(flat, size - k, axis=1)[:, size - k :]
    indices = indices[row, np.argsort(flat[row, indices], axis=1)[:, ::-1]]
    shape = (*array.shape[:-1], k)
    return flat[row, indices].reshape(shape), indices.astype(np.int32).reshape(shape)


# Normalisation


def normalise(pixels: Array, how: Normalise, out: Array) -> None:
    """Write (pixels - mean) / std into `out`, which is float32 and contiguous and has the shape of `pixels`.

    `how` must fit that shape, as `decode_request` checks.
    """
    mean, std = np.array(how.mean, np.float32), np.array(how.std, np.float32)
    if how.channels > 1:
        following = pixels.shape[how.axis + 1 :]
        if not following and how.axis > 1:  # channels last: merge two axes, for longer inner loops of numpy
            *outer, width, channels = pixels.shape
            pixels, out = (array.reshape(*outer, width * channels) for array in (pixels, out))
            mean, std = (np.tile(np.broadcast_to(numbers, channels), width) for numbers in (mean, std))
        mean, std = (numbers.reshape(-1, *[1] * len(following)) for numbers in (mean, std))
    np.subtract(pixels, mean, out=out, dtype=np.float32)
    np.divide(out, std, out=out)
