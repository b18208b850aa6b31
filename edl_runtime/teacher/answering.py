"""From a request's body to its answer's: decode, run the model, encode."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import structlog

from edl_runtime.errors import AnswerLimitError, ProtocolError
from edl_runtime.protocol.requests import decode_request
from edl_runtime.protocol.responses import encode_response
from edl_runtime.teacher.models import Model

log = structlog.get_logger(__name__)


class Answer(NamedTuple):
    """What to send: the first `size` bytes of the answer's area. `json_size` as Inference-Header-Content-Length."""

    status: int
    json_size: int | None
    size: int


def answer(model: Model, body: memoryview, json_size: int | None, into: memoryview) -> Answer:
    """Answer one request into the area `into`; never raises for what the client sent or the model did."""
    try:
        request = decode_request(body, json_size, model.signature)
    except ProtocolError as error:
        return refuse(into, 400, str(error))
    try:
        outputs = model.run(request.inputs, tuple(request.outputs))
        arrays = {name: np.asarray(outputs[name]) for name in request.outputs}
        return Answer(200, *encode_response(model.signature, request, arrays, into))
    except AnswerLimitError as error:  # no other teacher's would be smaller
        return refuse(into, 413, str(error))
    except Exception as error:
        log.exception("model.failed", model=model.signature.name)
        return refuse(into, 500, f"the model failed: {type(error).__name__}: {error}")


def refuse(into: memoryview, status: int, reason: str) -> Answer:
    """Write an error into the area `into`."""
    body = msgspec.json.encode({"error": reason[:4000]})
    into[: len(body)] = body
    return Answer(status, None, len(body))
