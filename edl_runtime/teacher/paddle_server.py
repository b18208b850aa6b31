"""Answers clients of Paddle Serving: its general model service by HTTP, gRPC and baidu_std, all on one port.

The first four bytes of a connection tell them apart: "PRPC" begins a frame of baidu_std (brpc), "PRI " gRPC's HTTP/2,
and anything else is HTTP/1.1. https://brpc.apache.org/docs/rpc-protocols/baidu_std/
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
from aiohttp import web
from google.protobuf import json_format

from edl_runtime.log import get_logger
from edl_runtime.protocol.address import has_token
from edl_runtime.protocol.compression import GZIP, ZLIB, inflated
from edl_runtime.protocol.errors import InferenceError, ProtocolError, TeacherError
from edl_runtime.protocol.infer_messages import JSON_LIMIT, REQUEST_JSON_LIMIT, check_size
from edl_runtime.protocol.listener import ConnectionTable, accepting, listen
from edl_runtime.protocol.paddle_serving import (
    FLOATS,
    FRAME,
    GENERAL,
    GENERAL_JSON,
    GENERAL_PATH,
    GENERAL_SERVICE,
    LISTS,
    OLD_GENERAL,
    RPC,
    arrays_of_instances,
    arrays_of_tensors,
    fill_tensor,
    frame_sizes,
    is_old_request,
    old_response,
    pack_frame,
)
from edl_runtime.protocol.proto import MOST_FIELDS, parsed
from edl_runtime.teacher.grpc_server import SERVER_OPTIONS, ServiceHandler, method_of_one_message
from edl_runtime.teacher.http.admission import SideMemory
from edl_runtime.teacher.http.routes import UNAUTHORIZED
from edl_runtime.teacher.local_requests import LocalRequests
from edl_runtime.teacher.other_body import MESSAGE_LIMIT, OtherBody

PATHS = (GENERAL_PATH, "/GeneralModelService/debug")

MOST_CONNECTIONS = 128

STALLED_S = 3.0

LINGER_S = 2.0
"""How long the rest of a refused request is read and dropped, for its client to read the answer."""

PIECE = 1 << 16
"""Numbers that are made JSON at a time."""

_JSON_MEMORY = 25
"""Bytes of memory for each of JSON while it is read: measured 10 to 16, besides text as Python keeps it."""

Choose = Callable[[bytes], asyncio.Protocol]

log = get_logger(__name__)


class GeneralModelService:
    """Answers the service's requests, as bytes. With a `token`, clients need it.

    Old clients send inputs without names, in the order of `inputs`.
    """

    def __init__(self, requests: LocalRequests, inputs: Sequence[str], token: str = "") -> None:
        self._requests = requests
        self._inputs = inputs
        self._token = token

    def admits(self, given: str) -> bool:
        """Whether an Authorization header has the token."""
        return has_token(given, self._token)

    @property
    def memory(self) -> SideMemory:
        return self._requests.memory

    async def answer(self, content: bytes, body: OtherBody) -> bytes:
        """Return the answer to a Request, which came as `body`; an error is one with its `err_no`.

        Raises ProtocolError for other bytes, and for any error in the request of an old client, as its answers have no
        place for one; InferenceError without room.
        """
        if is_old_request(content):
            return await self._answer_old(await body.parsed(OLD_GENERAL["Request"], content))
        request = await body.parsed(GENERAL["Request"], content)
        answer = GENERAL["Response"](log_id=request.log_id)
        try:
            inputs = await asyncio.to_thread(arrays_of_tensors, request.tensor, "input")
            outputs = await self._requests.infer(inputs, list(request.fetch_var_names))
            output = answer.outputs.add(engine_name="general_infer_0")
            for name, array in outputs.items():
                fill_tensor(output.tensor.add(name=name, alias_name=name), array)
        except (ProtocolError, InferenceError) as error:
            answer.ClearField("outputs")
            answer.err_no = error.status if isinstance(error, InferenceError) else 400
            answer.err_msg = error.reason if isinstance(error, InferenceError) else str(error)
        return bytes(answer.SerializeToString())

    async def _answer_old(self, request: Any) -> bytes:
        inputs = await asyncio.to_thread(arrays_of_instances, request.insts, self._inputs)
        try:
            outputs = await self._requests.infer(inputs, list(request.fetch_var_names))
        except InferenceError as error:
            raise ProtocolError(f"{error.status}: {error.reason}") from None
        return bytes(old_response(outputs).SerializeToString())


# HTTP


def http_handler(service: GeneralModelService) -> web.Server:
    """Return what makes a protocol for a connection that speaks HTTP/1.1."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.path not in PATHS:
            return web.json_response({"error": f"nothing at {request.path[:200]}; served is {PATHS[0]}"}, status=404)
        if request.method != "POST":
            return web.json_response({"error": f"{request.method} is not allowed here"}, status=405)
        if not service.admits(request.headers.get("Authorization", "")):
            return web.json_response({"error": UNAUTHORIZED}, status=401)
        is_json = request.content_type == "application/json"
        disconnect = request.protocol.force_close
        try:
            with OtherBody(service.memory, request.content_length or 0, disconnect) as body:
                content = await _http_body(request, body)
                answer = await service.answer(await _from_json(content, body) if is_json else content, body)
                if is_json:
                    answer = await asyncio.to_thread(_json_of, answer)
        except ProtocolError as error:
            return web.json_response({"error": str(error)[:1000]}, status=400)
        except InferenceError as error:
            return web.json_response({"error": error.reason}, status=error.status)
        # without a charset, or the client takes the body for JSON
        kind = "application/json; charset=utf-8" if is_json else "application/proto"
        response = web.Response(body=answer, headers={"Content-Type": kind})
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            response.enable_compression(web.ContentCoding.gzip)
        return response

    def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop)

    return web.Server(handle, access_log=None, request_factory=request, auto_decompress=False, lingering_time=LINGER_S)


async def _http_body(request: web.BaseRequest, body: OtherBody) -> bytes:
    """Return a request's body, unpacked. Raises ProtocolError, and InferenceError without room."""
    body.check_size(request.content_length or 0)
    encoding = request.headers.get("Content-Encoding", "").lower()
    if encoding not in ("", "identity", "gzip"):
        raise ProtocolError(f"Content-Encoding is {encoding[:40]!r}, allowed is gzip")
    received = bytearray()
    try:
        async for piece in request.content.iter_any():
            body.receive(len(piece))
            received += piece
        content = bytes(received)
    except ConnectionResetError:
        raise ProtocolError("the client has disconnected") from None
    finally:
        received.clear()  # aiohttp keeps that error, which keeps this frame
    body.end()
    return await body.unpacked(content, partial(inflated, wbits=GZIP)) if encoding == "gzip" else content


async def _from_json(content: bytes, body: OtherBody) -> bytes:
    """Return a Request that is JSON as protobuf. Raises ProtocolError, and InferenceError without room."""
    if len(content) > REQUEST_JSON_LIMIT:
        allowed = f"allowed are {REQUEST_JSON_LIMIT}; send protobuf"
        raise ProtocolError(f"the request has {len(content)} bytes of JSON, {allowed}")
    if content.count(b"{") > MOST_FIELDS:
        raise ProtocolError(f"the request has more than {MOST_FIELDS} objects")
    body.take(len(content) * _JSON_MEMORY)
    return await asyncio.to_thread(_protobuf_of, content)


def _protobuf_of(content: bytes) -> bytes:
    try:
        return bytes(json_format.Parse(content, GENERAL_JSON["Request"]()).SerializeToString())
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise ProtocolError(str(error)) from None


def _json_of(answer: bytes) -> bytes:
    """Return an answer as JSON, whose 64-bit numbers are numbers, too: protobuf would make them text.

    Raises AnswerLimitError.
    """
    message = GENERAL["Response"].FromString(answer)
    lists = [[_taken_lists(tensor) for tensor in output.tensor] for output in message.outputs]
    found = json_format.MessageToDict(message, preserving_proto_field_name=True)
    for output, taken in zip(found.get("outputs", ()), lists, strict=True):
        for tensor, more in zip(output.get("tensor", ()), taken, strict=True):
            tensor |= more  # noqa: PLW2901 - in place
    content = msgspec.json.encode(found)
    check_size(len(content), JSON_LIMIT)
    return content


def _taken_lists(tensor: Any) -> dict[str, msgspec.Raw]:
    """Return the lists of numbers of a tensor as JSON, and remove them from it: protobuf takes a second for 300,000."""
    taken = {}
    for field in LISTS:
        values = getattr(tensor, field)
        if isinstance(values, bytes):
            values = np.frombuffer(values, FLOATS[field])
        if len(values):
            taken[field] = msgspec.Raw(b"[" + b",".join(_json_pieces(values)) + b"]")
            tensor.ClearField(field)
    return taken


def _json_pieces(values: Any) -> Iterator[bytes]:
    """Yield the numbers as JSON, as few at a time as take little memory as Python's objects."""
    size = 0
    for at in range(0, len(values), PIECE):
        piece = values[at : at + PIECE]
        if isinstance(piece, np.ndarray):
            known = piece.tolist()
            piece = known if np.isfinite(piece).all() else [_finite(value) for value in known]
        content = msgspec.json.encode(piece)[1:-1]
        size += len(content)
        check_size(size, JSON_LIMIT)
        yield content


def _finite(value: float) -> float | str:
    """Return a number as protobuf has it in JSON, which has no NaN."""
    return value if math.isfinite(value) else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]


# baidu_std


class BrpcConnection(asyncio.Protocol):
    """A connection of a brpc client, whose requests are answered one at a time, in order."""

    def __init__(self, service: GeneralModelService) -> None:
        self._service = service
        self._buffer = bytearray()
        self._body: OtherBody | None = None  # what has come of the next frame, in memory that is counted
        self._request: Any = None  # the RpcMeta of the frame whose body has not come
        self._answering: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a socket's transport is one

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self._body is not None:
            self._service.memory.give_back(self._body)
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._advance(len(data))

    def _advance(self, received: int = 0) -> None:
        try:
            self._count(received)
            self._begin_answer()
        except (ProtocolError, InferenceError) as error:
            log.warning("client.refused", cause=str(error))
            self._transport.abort()

    def _count(self, received: int) -> None:
        """Count bytes of the next frame that have come. Raises InferenceError without room."""
        if received and self._body is None:
            self._body = OtherBody(self._service.memory, disconnect=self._transport.abort)
        if self._body is not None:
            self._body.receive(received)

    def _begin_answer(self) -> None:
        """Answer the next frame if all of it has come. Raises ProtocolError, and InferenceError without room."""
        if self._answering is not None or len(self._buffer) < FRAME.size:
            return
        size, meta_size = frame_sizes(self._buffer, MESSAGE_LIMIT)
        start = FRAME.size + meta_size
        if self._request is None and len(self._buffer) >= start:
            self._request = parsed(RPC["RpcMeta"], bytes(self._buffer[FRAME.size : start]), "the frame's head")
            if not self._service.admits(f"Bearer {self._request.authentication_data.decode('latin-1')}"):
                answer = RPC["RpcMeta"](correlation_id=self._request.correlation_id)
                answer.response.error_code, answer.response.error_text = 1004, UNAUTHORIZED  # ERPCAUTH
                self._transport.write(pack_frame(answer, b""))
                self._transport.close()  # before the body has come
                return
        if self._request is None or self._body is None or len(self._buffer) < FRAME.size + size:
            return
        request, self._request = self._request, None
        body, self._body = self._body, None
        body.end()
        content = bytes(memoryview(self._buffer)[start : FRAME.size + size])
        del self._buffer[: FRAME.size + size]
        self._transport.pause_reading()
        self._answering = asyncio.get_running_loop().create_task(self._answer(request, content, body))
        self._answering.add_done_callback(partial(self._answered, body))
        self._count(len(self._buffer))  # what has come of the frame behind it

    def _answered(self, body: OtherBody, task: asyncio.Task[None]) -> None:
        self._service.memory.give_back(body)
        self._answering = None
        if task.cancelled() or self._transport.is_closing():
            return
        if task.exception() is not None:
            log.error("client.failed", cause=repr(task.exception()))
            self._transport.abort()
            return
        self._transport.resume_reading()
        self._advance()

    async def _answer(self, request: Any, content: bytes, body: OtherBody) -> None:
        meta = RPC["RpcMeta"](correlation_id=request.correlation_id)
        answer = b""
        meta.response.error_code = 0
        try:
            content = await body.unpacked(content, partial(_unpacked, request.compress_type))
            answer = await self._service.answer(content, body)
        except ProtocolError as error:
            meta.response.error_code, meta.response.error_text = 1003, str(error)  # brpc's EREQUEST
        except InferenceError as error:
            meta.response.error_code, meta.response.error_text = 2004, error.reason  # ELIMIT
        self._transport.write(pack_frame(meta, answer))


def _unpacked(compress_type: int, body: bytes) -> bytes:
    """Return a body as brpc packed it: 0 not at all, 2 gzip, 3 zlib. Raises ProtocolError."""
    if compress_type == 0:
        return body
    if compress_type not in (2, 3):
        raise ProtocolError(f"compress_type is {compress_type}, allowed are 0 (none), 2 (gzip) and 3 (zlib)")
    return inflated(body, GZIP if compress_type == 2 else ZLIB)


# gRPC, and all on one port


class GrpcRelay(asyncio.Protocol):
    """Passes a connection on to the gRPC server, which can only listen by itself."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._waiting = b""
        self._other: asyncio.Transport | None = None
        self._transport: asyncio.Transport
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.pause_reading()
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._other, _ = await loop.create_unix_connection(lambda: _Back(self._transport), self._path)
        except OSError as error:
            log.warning("client.failed", cause=str(error))
            self._transport.abort()
            return
        self._other.write(self._waiting)
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._waiting += data
        else:
            self._other.write(data)

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._connecting is not None:
            self._connecting.cancel()
        if self._other is not None:
            self._other.close()


class _Back(asyncio.Protocol):
    """What the gRPC server sends goes to the client."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def pause_writing(self) -> None:
        self._client.pause_reading()

    def resume_writing(self) -> None:
        self._client.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._client.close()


class _Client(asyncio.Protocol):
    """A connection; its first four bytes choose the protocol that it is passed on to."""

    def __init__(self, choose: Choose, connections: ConnectionTable[_Client]) -> None:
        self._choose = choose
        self._connections = connections
        self._first = b""
        self._heard_at = 0.0
        self._protocol: asyncio.Protocol | None = None
        self._transport: asyncio.Transport

    # Of a connection in a ConnectionTable

    idle = False  # not known here

    @property
    def stalled_for(self) -> int:
        """Seconds of silence from `STALLED_S` on; the client may wait for an answer."""
        silent_s = asyncio.get_running_loop().time() - self._heard_at
        return round(silent_s) if silent_s >= STALLED_S else 0

    def abort(self) -> None:
        self._transport.abort()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._connections.handshake_done(self)

    def data_received(self, data: bytes) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        if self._protocol is not None:
            self._protocol.data_received(data)
            return
        self._first += data
        if len(self._first) >= 4:
            self._connections.mark_used(self)
            self._protocol = self._choose(self._first[:4])
            self._protocol.connection_made(self._transport)
            self._protocol.data_received(self._first)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received() if self._protocol else None

    def pause_writing(self) -> None:
        if self._protocol:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol:
            self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        if self._protocol:
            self._protocol.connection_lost(exc)


@asynccontextmanager
async def serving_paddle(
    service: GeneralModelService, host: str, port: int, *, most_connections: int = MOST_CONNECTIONS
) -> AsyncIterator[int]:
    """Serve on a port during the block; yields its number. Raises TeacherError when it can't listen.

    Where there are more connections than `most_connections`, one that has sent nothing yet, or else the one that has
    been silent for longest, is closed.
    """
    methods = dict.fromkeys(("inference", "debug"), method_of_one_message(service.answer, service.memory))
    http = http_handler(service)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="edl-grpc-"))
        path = str(Path(folder) / "socket")
        grpc_server = grpc.aio.server(options=SERVER_OPTIONS)
        grpc_server.add_generic_rpc_handlers((ServiceHandler(GENERAL_SERVICE, methods, service.admits),))
        grpc_server.add_insecure_port(f"unix:{path}")
        await grpc_server.start()
        stack.push_async_callback(grpc_server.stop, 1.0)
        stack.push_async_callback(http.shutdown, 1.0)

        def choose(first: bytes) -> asyncio.Protocol:
            if first == b"PRPC":
                return BrpcConnection(service)
            return GrpcRelay(path) if first == b"PRI " else http()

        try:
            listener = listen(host, port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise TeacherError(f"can't listen on {host} port {port} for Paddle Serving: {reason}") from None
        connections: ConnectionTable[_Client] = ConnectionTable(most_connections, most_connections // 2)
        number = listener.getsockname()[1]
        async with accepting(listener, connections, lambda: _Client(choose, connections)):
            yield number
        for connection in connections:
            connection.abort()
