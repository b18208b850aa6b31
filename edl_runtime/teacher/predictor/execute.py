"""From a request's body to its answer's: decode, join inputs, run the model, select outputs, encode."""

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
    """Return `signature` with what is answered of that model beyond the standard. `joins`: requests may be joined."""
    can = {
        "top_k": any(len(spec.shape) > 1 for spec in signature.outputs),
        "normalise": any(spec.datatype == "FP32" and len(spec.shape) > 1 for spec in signature.inputs),
        JOIN_EXTENSION: joins and can_join(signature),
    }
    return msgspec.structs.replace(signature, extensions=tuple(name for name, able in can.items() if able))


class EncodedAnswer(NamedTuple):
    """What to send: the first `size` bytes of the answer's area. `json_size` as Inference-Header-Content-Length.

    `predictor_died`: while it worked on this request.
    """

    status: int
    json_size: int | None
    size: int
    predictor_died: bool = False


def answer_request(
    model: Model, body: memoryview, json_size: int | None, into: memoryview, region: memoryview | None = None
) -> EncodedAnswer:
    """Answer one request into the area `into`; never raises for what the client sent or the model did.

    `region` is the memory that the client shares, if it does.
    """
    request = decode_or_refuse(model.signature, body, json_size, into, region)
    return request if isinstance(request, EncodedAnswer) else run_alone(model, request, into)


def decode_or_refuse(
    signature: ModelSignature, body: memoryview, json_size: int | None, into: memoryview, region: memoryview | None
) -> InferRequest | EncodedAnswer:
    """Return the request that lies in `body`, or the answer to one that can't be served."""
    try:
        return decode_request(body, json_size, signature, region)
    except ProtocolError as error:
        return encode_refusal(into, 400, str(error))


def run_alone(model: Model, request: InferRequest, into: memoryview) -> EncodedAnswer:
    """Run the model for one request and answer it."""
    try:
        outputs = model.run(joined_inputs([request], model.signature), needed_outputs([request]))
        return encode_answer(model.signature, request, outputs, into)
    except Exception as error:  # noqa: BLE001 - the model's
        # Not `log.exception`: with rich installed, it takes a second to write all variables down, students' data too.
        log.error("model.failed", model=model.signature.name, exception=_encodable(traceback.format_exc()))  # noqa: TRY400
        return encode_refusal(into, 500, f"the model failed: {type(error).__name__}: {error}")


def encode_answer(
    signature: ModelSignature, request: InferRequest, outputs: Mapping[str, Array], into: memoryview
) -> EncodedAnswer:
    """Answer `request` with what the model gave for it. Raises KeyError or so when that is not what it promised."""
    try:
        tensors = _requested_tensors(request, outputs)
    except ProtocolError as error:
        return encode_refusal(into, 400, str(error))
    try:
        return EncodedAnswer(200, *encode_response(signature, request, tensors, into))
    except AnswerLimitError as error:  # no other teacher's would be smaller
        return encode_refusal(into, 413, str(error))


def _requested_tensors(request: InferRequest, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors of the answer. Raises ProtocolError for those that can't be answered as asked for."""
    tensors = select_outputs(outputs, request.requested)
    for name, binary in request.outputs.items():
        if not binary and tensors[name].dtype.kind == "f" and not np.isfinite(tensors[name]).all():
            raise ProtocolError(f"output {name!r} has numbers that JSON lacks, NaN or infinite; ask for it as binary")
    return tensors


def encode_refusal(into: memoryview, status: int, reason: str) -> EncodedAnswer:
    """Write an error into the area `into`."""
    body = msgspec.json.encode({"error": _encodable(reason[:4000])})
    into[: len(body)] = body
    return EncodedAnswer(status, None, len(body))


def _encodable(text: str) -> str:
    """Return `text` with what can't be written replaced, as the names of some files have it."""
    return text.encode("utf-8", "replace").decode()


# Inputs and outputs of several requests


def can_join(signature: ModelSignature) -> bool:
    """Whether the model takes and answers batches of any size."""
    tensors = [*signature.inputs, *signature.outputs]
    return bool(signature.inputs) and all(spec.shape[:1] == (-1,) for spec in tensors)


def needed_outputs(requests: Iterable[InferRequest]) -> list[str]:
    """Return the outputs of the model that these requests' answers are made of."""
    requested = (wish for request in requests for wish in request.requested)
    return list(dict.fromkeys(wish if isinstance(wish, str) else wish.name for wish in requested))


def joined_inputs(requests: Sequence[InferRequest], signature: ModelSignature) -> dict[str, Array]:
    """Return what the model takes for all these requests, joined along the batch axis; of one alone without a copy.

    All of it is read-only.
    """
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
    """Return each request's part of the outputs of a joined run. Raises ValueError for one that has not all rows."""
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
    """Return the tensors, by the names they are answered under, that `requested` ask for of what a model gave.

    Raises ProtocolError for an output that has not so many as are wished for, KeyError for one that is not there.
    """
    tensors: dict[str, Array] = {}
    for wish in requested:
        if isinstance(wish, str):
            tensors[wish] = np.asarray(outputs[wish])
            continue
        try:
            largest = top_k(np.asarray(outputs[wish.name]), wish.k)
        except ProtocolError as error:
            raise ProtocolError(f"output {wish.name!r}: {error}") from None
        tensors.update(zip(response_names(wish), largest, strict=True))
    return tensors


def top_k(array: Array, k: int) -> tuple[Array, Array]:
    """Return the `k` largest along the last axis, largest first (NaN before all), and where they stand, as int32.

    Which of several equal ones are taken is not said. Raises ProtocolError when there are fewer than `k`.
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

    `how` must fit that shape: `decode_request` has seen to it.
    """
    mean, std = np.array(how.mean, np.float32), np.array(how.std, np.float32)
    if how.channels > 1:
        following = pixels.shape[how.axis + 1 :]
        if not following and how.axis > 1:  # channels last: as one axis with the one before, numpy's loops get longer
            *outer, width, channels = pixels.shape
            pixels, out = (array.reshape(*outer, width * channels) for array in (pixels, out))
            mean, std = (np.tile(np.broadcast_to(numbers, channels), width) for numbers in (mean, std))
        mean, std = (numbers.reshape(-1, *[1] * len(following)) for numbers in (mean, std))
    np.subtract(pixels, mean, out=out, dtype=np.float32)
    np.divide(out, std, out=out)
