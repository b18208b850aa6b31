"""Connections to servers of Paddle Serving: its general model service and its Python pipelines.

A pipeline answers with what numpy prints, which is parsed here and evaluated nowhere.
"""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Container, Mapping, Sequence
from contextlib import closing, suppress
from typing import IO, Any, Protocol

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from edl_runtime.external.address import ServerAddress
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.client import ANSWER_LIMIT
from edl_runtime.protocol.errors import InferenceError, ProtocolError
from edl_runtime.protocol.infer_messages import TensorHead, array_from_json, check_payload
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


def check_http(endpoint: tuple[str, int], timeout_s: float) -> None:
    """See that a server of HTTP answers, as brpc does at the port of its frames. Raises OSError when it does not."""
    connection = http.client.HTTPConnection(*endpoint, timeout=timeout_s)
    with closing(connection), suppress(http.client.HTTPException):  # another answer is one
        connection.request("GET", "/health")
        connection.getresponse()


class HttpCarrier:
    """Posts messages to a path: those of a pipeline as JSON, all others as they are."""

    def __init__(self, address: ServerAddress, path: str, timeout_s: float, *, as_json: bool) -> None:
        self._address = str(address)
        self._path = path
        self._as_json = as_json
        self._timeout_s = timeout_s
        self._connection = http.client.HTTPConnection(*endpoint_of(address.endpoint), timeout=timeout_s)

    def open(self) -> None:
        if self._connection.sock is None:
            self._connection.connect()

    def close(self) -> None:
        sock = self._connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes a call in another thread
        self._connection.close()

    def check(self) -> None:
        check_http((self._connection.host, self._connection.port), self._timeout_s)

    def call(self, method: str, request: Any, answer: Any) -> Any:  # noqa: ARG002 - the path says it
        kind = "application/json" if self._as_json else "application/proto"
        body = json_of(request) if self._as_json else request.SerializeToString()
        try:
            self._connection.request("POST", self._path, body, {"Content-Type": kind})
            response = self._connection.getresponse()
            declared = response.length or 0
            content = response.read(ANSWER_LIMIT if declared <= ANSWER_LIMIT else 0)
        except OSError:  # first: that the server closed the connection is an HTTPException, too
            self._connection.close()
            raise
        except http.client.HTTPException as error:
            self._connection.close()
            raise ProtocolError(f"{self._address}: {error!r}") from None
        if len(content) < declared:
            self._connection.close()
            fault = f"Content-Length is {declared}, {len(content)} bytes came, at most {ANSWER_LIMIT} are allowed"
            raise ProtocolError(f"{self._address}: {fault}")
        if response.status != 200:
            reason = content[:200].decode("utf-8", "replace")
            raise InferenceError(self._address, response.status, reason, retryable=response.status >= 500)
        if not self._as_json:
            return parsed(answer, content, self._address)
        try:
            return _answer_decoder.decode(content)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self._address}: its answer is invalid: {error}") from None


class BrpcCarrier:
    """Sends messages in frames of baidu_std, one at a time."""

    def __init__(self, address: ServerAddress, timeout_s: float) -> None:
        self._address = str(address)
        self._endpoint = endpoint_of(address.endpoint)
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._number = 0

    def open(self) -> None:
        if self._socket is None:
            self._socket = socket.create_connection(self._endpoint, self._timeout_s)

    def close(self) -> None:
        connected = self._socket
        if connected is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)  # wakes a call in another thread
            connected.close()

    def check(self) -> None:
        check_http(self._endpoint, self._timeout_s)

    def call(self, method: str, request: Any, answer: Any) -> Any:
        self._number += 1
        service, _, name = method.strip("/").rpartition("/")
        meta = RPC["RpcMeta"](correlation_id=self._number)
        meta.request.service_name, meta.request.method_name = service, name
        try:
            self.open()
            found, content = self._exchange(pack_frame(meta, request.SerializeToString()))
        except (OSError, ProtocolError):
            self.close()
            self._socket = None
            raise
        if found.response.error_code:
            reason = f"error_code {found.response.error_code}: {found.response.error_text}"
            raise InferenceError(self._address, 500, reason, retryable=True)
        return parsed(answer, content, self._address)

    def _exchange(self, frame: bytes) -> tuple[Any, bytes]:
        if self._socket is None:
            raise ConnectionAbortedError(f"{self._address}: the connection is closed")
        self._socket.sendall(frame)
        with self._socket.makefile("rb") as stream:
            size, meta_size = frame_sizes(read_exactly(stream, FRAME.size), ANSWER_LIMIT)
            body = read_exactly(stream, size)
        meta = parsed(RPC["RpcMeta"], body[:meta_size], self._address)
        if meta.correlation_id != self._number or meta.compress_type:
            raise ProtocolError(f"{self._address}: its answer is to another request, or compressed")
        return meta, body[meta_size:]


def read_exactly(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise ConnectionResetError("the server closed the connection")
    return content


def parsed(message: Any, content: bytes, address: str) -> Any:
    """Return a message of its bytes. Raises ProtocolError."""
    try:
        return message.FromString(content)
    except DecodeError as error:
        raise ProtocolError(f"{address}: its answer is no {message.DESCRIPTOR.full_name}: {error}") from None


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

_PRINTED = re.compile(r"\s*(?:array\()?(\[[^)]*?\])\s*(?:,\s*dtype=\w+\s*)?\)?\s*", re.DOTALL)
_POINT_AT_END = re.compile(r"\.(?!\d)")
_lists_decoder: JsonDecoder[list[Any]] = JsonDecoder(list[Any])


def array_of_text(name: str, text: str, dtype: np.dtype[Any]) -> Array:
    """Return the array that numpy printed, or Python a list of lists of numbers. Raises ProtocolError."""
    found = _PRINTED.fullmatch(text)
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
