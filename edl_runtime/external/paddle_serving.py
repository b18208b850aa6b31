"""Connections to servers of Paddle Serving: its general model service and its Python pipelines.

A pipeline answers with what numpy prints, which is parsed here and evaluated nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import numpy as np

from edl_runtime.external.address import ServerAddress
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.client import ANSWER_LIMIT, METADATA_LIMIT, ReconnectingStream, TeacherConnection
from edl_runtime.protocol.errors import InferenceError, ProtocolError
from edl_runtime.protocol.infer_messages import JSON_LIMIT, TensorHead, array_from_json, check_payload
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.paddle_serving import (
    ELEMENT_TYPES,
    FRAME,
    GENERAL,
    GENERAL_PATH,
    GENERAL_SERVICE,
    PIPELINE,
    PIPELINE_SERVICE,
    RPC,
    arrays_of_tensors,
    fill_tensor,
    frame_sizes,
    pack_frame,
)
from edl_runtime.protocol.proto import parsed
from edl_runtime.protocol.tensors import Array, Tensor, datatype_of, dtype_of

__all__ = ["GENERAL_PATH", "BrpcCarrier", "GeneralModel", "HttpCarrier", "PipelineModel", "array_of_text"]


class Carrier(Protocol):
    """Takes messages to a server and back. Raises OSError, InferenceError, ProtocolError."""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def check(self) -> None:
        """See by a small request that the server answers, if only with an error. Raises OSError."""

    def call(self, method: str, request: Any, answer: Any) -> Any:
        """Return what a method of the server answers, a message of the class `answer`."""


class _PaddleServing:
    """A model of Paddle Serving. It tells neither whether it is ready nor what it takes: the address does."""

    def __init__(self, address: ServerAddress, carrier: Carrier) -> None:
        self._address = address
        self._carrier = carrier

    def open(self) -> None:
        self._carrier.open()

    def close(self) -> None:
        self._carrier.close()

    def check_ready(self) -> None:
        """See that the server answers: of its model it says nothing."""
        self._carrier.check()

    def signature(self) -> ModelSignature:
        return ModelSignature(name=self._address.model)

    def max_batch(self) -> None:
        return None

    def probe(self, row: Mapping[str, Array], outputs: Sequence[str]) -> None:
        """See that it answers."""
        self.infer(row, outputs)

    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Array]:
        raise NotImplementedError

    def _check(self, answer: Any) -> None:
        if answer.err_no:
            reason = f"err_no {answer.err_no}: {answer.err_msg}"
            raise InferenceError(str(self._address), 500, reason, retryable=True)

    def _require(self, name: str, found: Container[str]) -> None:
        if name not in found:
            raise ProtocolError(f"{self._address} left out output {name!r}")


class GeneralModel(_PaddleServing):
    """A model of the general model service, as the C++ server and our teachers have it."""

    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Array]:
        request = GENERAL["Request"](fetch_var_names=outputs)
        for name, tensor in inputs.items():
            fill_tensor(request.tensor.add(name=name, alias_name=name), np.asarray(tensor))
        answer = self._carrier.call(f"/{GENERAL_SERVICE}/inference", request, GENERAL["Response"])
        self._check(answer)
        arrays = arrays_of_tensors((tensor for output in answer.outputs for tensor in output.tensor), "output")
        for name in outputs:
            self._require(name, arrays)
        return arrays


class PipelineModel(_PaddleServing):
    """A model of a Python pipeline. An answer is text, and only the address says which type its numbers have."""

    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Array]:
        request = PIPELINE["Request"](name=self._address.model, method="prediction")
        for name, tensor in inputs.items():
            fill_tensor(request.tensors.add(name=name), np.asarray(tensor))
        answer = self._carrier.call(f"/{PIPELINE_SERVICE}/inference", request, PIPELINE["Response"])
        self._check(answer)
        texts = dict(zip(answer.key, answer.value, strict=False))
        arrays: dict[str, Array] = {}
        for spec in self._address.outputs:
            if not outputs or spec.name in outputs:
                self._require(spec.name, texts)
                arrays[spec.name] = array_of_text(spec.name, texts[spec.name], dtype_of(spec.datatype))
        if unknown := [name for name in outputs if name not in arrays]:
            raise ProtocolError(f"output {unknown[0]!r} is none of those that {self._address} declares")
        return arrays


# Carriers; the third is `GrpcChannel`


def check_http(endpoint: str, timeout_s: float) -> None:
    """See that a server of HTTP answers, as brpc does at the port of its frames. Raises OSError when it does not.

    Any answer will do, and so does a connection that it closes: it may speak nothing but frames.
    """
    with (
        TeacherConnection(endpoint, timeout_s=timeout_s) as connection,
        suppress(ProtocolError, ConnectionResetError),
    ):
        connection.post("/health", b"", "text/plain", METADATA_LIMIT)


class HttpCarrier:
    """Posts messages to a path: those of a pipeline as JSON, all others as they are."""

    def __init__(self, address: ServerAddress, path: str, timeout_s: float, *, as_json: bool, token: str = "") -> None:
        self._address = address
        self._path = path
        self._timeout_s = timeout_s
        self._as_json = as_json
        self._connection = TeacherConnection(address.endpoint, token=token, timeout_s=timeout_s)

    def open(self) -> None:
        self._connection.open()

    def close(self) -> None:
        self._connection.close()

    def check(self) -> None:
        check_http(self._address.endpoint, self._timeout_s)

    def call(self, method: str, request: Any, answer: Any) -> Any:  # noqa: ARG002 - the path says it
        kind = "application/json" if self._as_json else "application/proto"
        body = json_of(request) if self._as_json else request.SerializeToString()
        status, content = self._connection.post(self._path, body, kind, JSON_LIMIT if self._as_json else ANSWER_LIMIT)
        if status != 200:
            reason = content[:200].decode("utf-8", "replace")
            raise InferenceError(str(self._address), status, reason, retryable=status >= 500)
        if not self._as_json:
            return parsed(answer, content, f"{self._address}: its answer")
        try:
            return _answer_decoder.decode(content)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self._address}: its answer is invalid: {error}") from None


class BrpcCarrier:
    """Sends messages in frames of baidu_std, one at a time."""

    def __init__(self, address: ServerAddress, timeout_s: float, token: str = "") -> None:
        self._address = address
        self._token = token.encode()
        self._timeout_s = timeout_s
        self._link = ReconnectingStream(endpoint_of(address.endpoint), timeout_s)
        self._number = 0

    def open(self) -> None:
        with self._link:
            pass

    def close(self) -> None:
        self._link.close()

    def check(self) -> None:
        check_http(self._address.endpoint, self._timeout_s)

    def call(self, method: str, request: Any, answer: Any) -> Any:
        self._number += 1
        service, _, name = method.strip("/").rpartition("/")
        meta = RPC["RpcMeta"](correlation_id=self._number, authentication_data=self._token)
        meta.request.service_name, meta.request.method_name = service, name
        frame = pack_frame(meta, request.SerializeToString())
        with self._link as stream:
            stream.send([frame], len(frame))
            size, meta_size = frame_sizes(bytes(stream.read(FRAME.size)), ANSWER_LIMIT)
            body = bytes(stream.read(size))
            found = parsed(RPC["RpcMeta"], body[:meta_size], f"{self._address}: its answer")
            if found.correlation_id != self._number or found.compress_type:
                raise ProtocolError(f"{self._address}: its answer is to another request, or compressed")
        if found.response.error_code:
            reason = f"error_code {found.response.error_code}: {found.response.error_text}"
            raise InferenceError(str(self._address), 500, reason, retryable=True)
        return parsed(answer, body[meta_size:], f"{self._address}: its answer")


def json_of(request: Any) -> bytes:
    """Return a pipeline's request as JSON."""
    tensors = []
    for tensor in request.tensors:
        dtype, field = ELEMENT_TYPES[tensor.elem_type]
        numbers = getattr(tensor, field)
        numbers = np.frombuffer(numbers, dtype).tolist() if isinstance(numbers, bytes) else list(numbers)
        named = {"name": tensor.name, "elem_type": tensor.elem_type, "shape": list(tensor.shape)}
        tensors.append({**named, field: numbers})
    return msgspec.json.encode({"tensors": tensors})


class _Answer(msgspec.Struct):
    err_no: int = 0
    err_msg: str = ""
    key: list[str] = []
    value: list[str] = []


_answer_decoder = JsonDecoder(_Answer)


# What numpy prints

_PRINTED = re.compile(r"(?:array\()?(\[[^)]*?\])(?:\s*,\s*dtype=\w+)?\s*\)?", re.DOTALL)
_POINT_AT_END = re.compile(r"\.(?!\d)")
_lists_decoder: JsonDecoder[list[Any]] = JsonDecoder(list[Any])


def array_of_text(name: str, text: str, dtype: np.dtype[Any]) -> Array:
    """Return the array that numpy printed, or Python a list of lists of numbers. Raises ProtocolError."""
    if len(text) > JSON_LIMIT:
        raise ProtocolError(f"output {name!r} has {len(text)} characters, allowed are {JSON_LIMIT}")
    found = _PRINTED.fullmatch(text.strip())
    try:
        # as JSON, which has no number that ends in a point
        data = _lists_decoder.decode(_POINT_AT_END.sub(".0", found[1] if found else ""))
    except msgspec.DecodeError:
        fault = f"{text[:80]!r} is no array of finite numbers as numpy prints it"
        raise ProtocolError(f"output {name!r}: {fault}") from None
    shape: list[int] = []
    first: Any = data
    while isinstance(first, list):
        shape.append(len(first))
        first = first[0] if first else None
    head = TensorHead(name, datatype_of(dtype), tuple(shape), data=data)
    check_payload([head], 0, "output")
    return array_from_json(head, "output")
