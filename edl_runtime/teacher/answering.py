"""From a request's body to its answer's: read, run the model, write."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from edl_runtime.errors import AnswerLimitError, ProtocolError
from edl_runtime.log import get_logger
from edl_runtime.protocol.oip import JOIN, ModelSignature
from edl_runtime.protocol.requests import InferRequest, decode_request
from edl_runtime.protocol.responses import encode_response
from edl_runtime.protocol.tensors import Array
from edl_runtime.teacher.joining import can_join, joined_inputs, needed_outputs
from edl_runtime.teacher.models import Model
from edl_runtime.teacher.topk import wished

log = get_logger(__name__)


def extended(signature: ModelSignature, *, joins: bool = False) -> ModelSignature:
    """Return `signature` with what is answered of that model beyond the standard. `joins`: requests may be joined."""
    can = {
        "top_k": any(len(spec.shape) > 1 for spec in signature.outputs),
        "normalise": any(spec.datatype == "FP32" and len(spec.shape) > 1 for spec in signature.inputs),
        JOIN: joins and can_join(signature),
    }
    return msgspec.structs.replace(signature, extensions=tuple(name for name, able in can.items() if able))


class Answer(NamedTuple):
    """What to send: the first `size` bytes of the answer's area. `json_size` as Inference-Header-Content-Length.

    `predictor_died`: while it worked on this request.
    """

    status: int
    json_size: int | None
    size: int
    predictor_died: bool = False


def answer(
    model: Model, body: memoryview, json_size: int | None, into: memoryview, region: memoryview | None = None
) -> Answer:
    """Answer one request into the area `into`; never raises for what the client sent or the model did.

    `region` is the memory that the client shares, if it does.
    """
    request = read(model.signature, body, json_size, into, region)
    return request if isinstance(request, Answer) else run_alone(model, request, into)


def read(
    signature: ModelSignature, body: memoryview, json_size: int | None, into: memoryview, region: memoryview | None
) -> InferRequest | Answer:
    """Return the request that lies in `body`, or the answer to one that can't be served."""
    try:
        return decode_request(body, json_size, signature, region)
    except ProtocolError as error:
        return refuse(into, 400, str(error))


def run_alone(model: Model, request: InferRequest, into: memoryview) -> Answer:
    """Run the model for one request and answer it."""
    try:
        outputs = model.run(joined_inputs([request], model.signature), needed_outputs([request]))
        return write(model.signature, request, outputs, into)
    except Exception as error:  # noqa: BLE001 - the model's
        # Not `log.exception`: with rich installed, it takes a second to write all variables down, students' data too.
        log.error("model.failed", model=model.signature.name, exception=_plain(traceback.format_exc()))  # noqa: TRY400
        return refuse(into, 500, f"the model failed: {type(error).__name__}: {error}")


def write(signature: ModelSignature, request: InferRequest, outputs: Mapping[str, Array], into: memoryview) -> Answer:
    """Answer `request` with what the model gave for it. Raises KeyError or so when that is not what it promised."""
    try:
        tensors = _answered(request, outputs)
    except ProtocolError as error:
        return refuse(into, 400, str(error))
    try:
        return Answer(200, *encode_response(signature, request, tensors, into))
    except AnswerLimitError as error:  # no other teacher's would be smaller
        return refuse(into, 413, str(error))


def _answered(request: InferRequest, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors of the answer. Raises ProtocolError for those that can't be answered as asked for."""
    tensors = wished(outputs, request.wishes)
    for name, binary in request.outputs.items():
        if not binary and tensors[name].dtype.kind == "f" and not np.isfinite(tensors[name]).all():
            raise ProtocolError(f"output {name!r} has numbers that JSON lacks, NaN or infinite; ask for it as binary")
    return tensors


def refuse(into: memoryview, status: int, reason: str) -> Answer:
    """Write an error into the area `into`."""
    body = msgspec.json.encode({"error": _plain(reason[:4000])})
    into[: len(body)] = body
    return Answer(status, None, len(body))


def _plain(text: str) -> str:
    """Return `text` with what can't be written replaced, as the names of some files have it."""
    return text.encode("utf-8", "replace").decode()
