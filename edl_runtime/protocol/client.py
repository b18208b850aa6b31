"""The student's client: one connection to one teacher, reconnected when needed, with shared memory where it pays.

Written for large tensors: `sendmsg` takes the arrays as they are in memory, `recv_into` fills the arrays that the
caller gets, and nothing is copied in between.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import msgspec
import numpy as np

from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.errors import InferenceError, ProtocolError
from edl_runtime.protocol.http_heads import (
    CONTENT_LENGTH,
    JSON_SIZE,
    PREDICTOR_DIED,
    RUN_ALONE,
    TRANSFER_ENCODING,
    ResponseHead,
    render_request,
)
from edl_runtime.protocol.infer_messages import (
    JSON_LIMIT,
    Buffer,
    EncodedRequest,
    RequestIds,
    decode_response,
    encode_request,
    with_id,
)
from edl_runtime.protocol.oip import ModelSignature, Normalise, ReceivedMetadata, TopK
from edl_runtime.protocol.shared_memory import (
    MAX_REGION_BYTES,
    REGISTER_PATH,
    SHARED_MEMORY_EXTENSION,
    TENSORS_START,
    ClientRegion,
    point_to_region,
)
from edl_runtime.protocol.tensor_stream import TensorStream
from edl_runtime.protocol.tensors import Array, Tensor
from edl_runtime.protocol.tls import Trust, open_tls
from edl_runtime.settings import check_token

ANSWER_LIMIT = 1 << 30
"""Most bytes of an answer."""

METADATA_LIMIT = 4 * 1024 * 1024
"""Most bytes of what a server says of its model and itself."""

_REFUSED_FOR_NOW = frozenset({408, 429})


class TeacherConnection:
    """A blocking keep-alive connection to a teacher that speaks the Open Inference Protocol v2 over HTTP/1.1.

    For one thread at a time; only `close` may be called from another. It opens on first use. After an OSError or
    ProtocolError it is disconnected, and the next call connects again.

    - `address`: "host:port".
    - `model`: the name of the model that the teacher serves.
    - `timeout_s`: limit of each call, and of connecting (5 s at most).
    - `trust`: the certificates to accept; None for a connection without TLS.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        model: str = "teacher",
        timeout_s: float = 30.0,
        trust: Trust | None = None,
    ) -> None:
        """Raise SpecError for an invalid `address` or `token`. Doesn't connect yet."""
        self.address = address
        self._link = ReconnectingStream(endpoint_of(address), timeout_s, trust)
        self._model_path = f"/v2/models/{quote(model, safe='')}"
        self._headers: dict[str, str | int] = {"Host": address}
        if token:
            self._headers["Authorization"] = f"Bearer {check_token('token', token)}"
        self._shared_memory = SharedMemoryUse(address)
        self._ids = RequestIds()
        self._last_head = (0, 0, b"")
        self._last_answer: _KnownAnswer | None = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Connect, unless connected. Raises OSError."""
        with self._link:
            pass

    def close(self) -> None:
        """Disconnect for good. Safe during a call in another thread, which raises OSError at once."""
        self._link.close()
        self._shared_memory.release()

    def ready(self) -> bool:
        """Whether the teacher takes requests for its model. Raises OSError, ProtocolError."""
        with self._link as stream:
            status, _ = self._get(stream, f"{self._model_path}/ready")
            return status == 200

    def signature(self) -> ModelSignature:
        """Return the model's signature. Raises InferenceError, OSError, ProtocolError."""
        with self._link as stream:
            status, body = self._get(stream, self._model_path)
            if status != 200:
                raise self._refusal(status, body)
            try:
                signature = _metadata_decoder.decode(body).signature()
            except msgspec.DecodeError as error:
                raise ProtocolError(f"teacher {self.address}: its model metadata is invalid: {error}") from None
        return self._shared_memory.note_signature(signature)

    def infer(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[str | TopK],
        normalise: Mapping[str, Normalise] = MappingProxyType({}),
        *,
        alone: bool = False,
    ) -> dict[str, Array]:
        """Return the model's `outputs` (empty: all) for `inputs`, as fresh writable arrays.

        `normalise` has the inputs that are uint8, by name, and how the teacher converts them to the model's float32. An
        answer has two arrays for a `TopK`; see there. With `alone`, the teacher joins no other request with this one.

        A sequence of rows is sent as one tensor without stacking it first. Don't change the inputs during the call.
        Large inputs go to a teacher on this machine in shared memory, if its `signature` lists that.

        Raises InferenceError when the teacher refuses (the connection stays usable), ProtocolError when inputs can't
        be sent or the answer is not what was requested, or has the id of another request, TimeoutError and other
        OSErrors when the network fails.
        """
        encoded = encode_request(inputs, outputs, normalise)
        arrays = self._exchange_shared(encoded, alone=alone) or self._exchange(*encoded[:3], alone=alone)
        for name in encoded.outputs:
            if name not in arrays:
                raise ProtocolError(f"teacher {self.address} left out output {name!r}")
        return arrays

    def infer_json(self, request: bytes) -> dict[str, Array]:
        """Send a request that is all JSON, for servers without the binary extension; return and raise as `infer`."""
        asked = self._ids.new()
        body = with_id(request, asked)
        headers = {**self._headers, "Content-Type": "application/json", "Content-Length": len(body)}
        head = render_request("POST", f"{self._model_path}/infer", headers)
        return self._ask([head, body], len(head) + len(body), asked)

    def post(self, path: str, body: bytes, kind: str, limit: int) -> tuple[int, bytes]:
        """Send a body of the content type `kind` to any path; return status and body of the answer.

        Raises OSError, ProtocolError, which is that of an answer of more than `limit` bytes, too.
        """
        head = render_request("POST", path, {**self._headers, "Content-Type": kind, "Content-Length": len(body)})
        with self._link as stream:
            stream.send([head, body], len(head) + len(body))
            answer, size = self._checked_head(stream, stream.read_head(), limit)
            return answer.status, bytes(stream.read(size))

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of what is below the model's path, as "/config". Raises OSError, ProtocolError."""
        return self.get_path(self._model_path + path)

    def get_path(self, path: str) -> tuple[int, bytes]:
        """Return status and body of what is at any path of the server. Raises as `get`."""
        with self._link as stream:
            status, body = self._get(stream, path)
            return status, bytes(body)

    def _exchange_shared(self, request: EncodedRequest, *, alone: bool) -> dict[str, Array] | None:
        """Send the inputs in shared memory; return None if that is not faster or not possible."""
        region = self._region_for(request.size)
        if region is None:
            return None
        region.write(request.buffers)
        header = point_to_region(request.header)
        try:
            return self._exchange(header, [], len(header), alone=alone)
        except InferenceError as refused:
            if refused.status != 400:
                raise
            self._shared_memory.disable(refused)  # if that was not the cause, the second try raises it
            return None

    def _exchange(self, header: bytes, buffers: Sequence[Array], size: int, *, alone: bool = False) -> dict[str, Array]:
        asked = self._ids.new()
        whole = with_id(header, asked)
        size += len(whole) - len(header)
        head = self._infer_head(len(whole), size, alone=alone)
        return self._ask([head, whole, *buffers], len(head) + size, asked)

    def _ask(self, buffers: Sequence[bytes | Array], size: int, asked: str) -> dict[str, Array]:
        """Send a request of `size` bytes, whose id is `asked`, to the model; return the arrays of its answer."""
        with self._link as stream:
            stream.send(buffers, size)
            known = self._last_answer
            if known is not None and stream.take(known.text(asked)):
                arrays = {name: np.empty(shape, dtype) for name, dtype, shape in known.arrays}
                unfilled: Iterable[Array] = arrays.values()
            else:
                arrays, unfilled = self._open_answer(stream, asked)
            for array in unfilled:
                stream.fill(array)
        return arrays

    def _open_answer(self, stream: TensorStream, asked: str) -> tuple[dict[str, Array], list[Array]]:
        """Read an answer up to its binary tensors; return all arrays, and those that the tensors fill, in order.

        It is remembered: the teacher's next answer most probably differs only in its id and the binary tensors.
        """
        head = stream.read_head()
        answer, size = self._checked_head(stream, head, ANSWER_LIMIT)
        if answer.status != 200:
            died = PREDICTOR_DIED in answer.headers
            raise self._refusal(answer.status, self._read_json(stream, size), predictor_died=died)
        json_size = answer.size(JSON_SIZE)
        json_size = size if json_size is None else min(json_size, size)
        text = bytes(self._read_json(stream, json_size))
        arrays, unfilled = decode_response(text, size - json_size, asked)
        if len(unfilled) == len(arrays) and answer.keep_alive and CONTENT_LENGTH in answer.headers:
            shapes = [(name, array.dtype, array.shape) for name, array in arrays.items()]
            self._last_answer = _KnownAnswer((head + text).split(asked.encode()), shapes)
        return arrays, unfilled

    def _region_for(self, size: int) -> ClientRegion | None:
        """Return shared memory for a request of `size` bytes; None to send it through the socket."""
        if not self._shared_memory.is_worthwhile(size):
            return None
        try:
            with self._link as stream:
                region = self._shared_memory.registered(stream, size)
                if region is None and (region := self._shared_memory.create(stream, size)) is not None:
                    with region.offered() as registration:
                        self._register(stream, registration)
        except (InferenceError, ProtocolError) as refused:
            self._shared_memory.disable(refused)
            return None
        return region

    def _register(self, stream: TensorStream, registration: bytes) -> None:
        headers = {**self._headers, "Content-Type": "application/json", "Content-Length": len(registration)}
        request = render_request("POST", REGISTER_PATH, headers)
        stream.send([request, registration], len(request) + len(registration))
        answer, size = self._checked_head(stream, stream.read_head(), METADATA_LIMIT)
        body = self._read_json(stream, size)
        if answer.status != 200:
            raise self._refusal(answer.status, body)
        if not answer.keep_alive:
            raise ProtocolError(f"teacher {self.address} disconnected after it registered shared memory")

    def _get(self, stream: TensorStream, path: str) -> tuple[int, memoryview]:
        request = render_request("GET", path, self._headers)
        stream.send([request], len(request))
        answer, size = self._checked_head(stream, stream.read_head(), METADATA_LIMIT)
        return answer.status, stream.read(size)

    def _infer_head(self, json_size: int, size: int, *, alone: bool) -> bytes:
        """Return the head of a request, reusing the last one if the sizes are equal."""
        if self._last_head[:2] == (json_size, size) and not alone:
            return self._last_head[2]
        headers = {
            **self._headers,
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": json_size,
            "Content-Length": size,
        }
        path = f"{self._model_path}/infer"
        if alone:
            return render_request("POST", path, {**headers, RUN_ALONE.decode(): 1})
        head = render_request("POST", path, headers)
        self._last_head = json_size, size, head
        return head

    def _checked_head(self, stream: TensorStream, head: bytes, limit: int) -> tuple[ResponseHead, int]:
        """Return a head, and the size of the body that `stream` has behind it: `limit` at most."""
        answer = ResponseHead(head)
        self._link.keep = answer.keep_alive
        coding = answer.headers.get(TRANSFER_ENCODING)
        if coding is not None:
            if coding.lower() != b"chunked":
                given = coding[:40].decode("latin-1")
                raise ProtocolError(
                    f"teacher {self.address} answers with Transfer-Encoding {given!r}, allowed is chunked"
                )
            return answer, stream.join_chunks(head, limit)
        size = answer.size(CONTENT_LENGTH)
        if size is None or size > limit:
            given = "neither Content-Length nor chunks" if size is None else f"{size} bytes"
            raise ProtocolError(f"teacher {self.address} answers {given}, allowed are {limit} bytes")
        return answer, size

    def _read_json(self, stream: TensorStream, size: int) -> memoryview:
        if size > JSON_LIMIT:
            raise ProtocolError(f"teacher {self.address} answers {size} bytes of JSON, allowed are {JSON_LIMIT}")
        return stream.read(size)

    def _refusal(self, status: int, body: Buffer, *, predictor_died: bool = False) -> InferenceError:
        try:
            reason = _refusal_decoder.decode(body).error
        except msgspec.DecodeError:
            reason = bytes(body[:200]).decode("utf-8", "replace") or "no reason given"
            if reason.startswith("Traceback"):  # as MLServer answers; the error is in the last line
                reason = bytes(body[-200:]).decode("utf-8", "replace").strip().rpartition("\n")[2]
        retryable = status >= 500 or status in _REFUSED_FOR_NOW
        return InferenceError(self.address, status, reason, retryable=retryable, predictor_died=predictor_died)


class _KnownAnswer(NamedTuple):
    """An answer with binary arrays only: what is before and behind its id, and name, dtype and shape of each array."""

    parts: list[bytes]
    arrays: list[tuple[str, np.dtype[Any], tuple[int, ...]]]

    def text(self, asked: str) -> bytes:
        """Return what is before the arrays in such an answer to the request with the id `asked`."""
        return asked.encode().join(self.parts)


class _Refusal(msgspec.Struct):
    error: str


# Made while one thread imports this: msgspec crashes when several threads are the first to decode a type.
_metadata_decoder = JsonDecoder(ReceivedMetadata)
_refusal_decoder = JsonDecoder(_Refusal)


# Reconnection

_CONNECT_TIMEOUT_S = 5.0


class ReconnectingStream:
    """Provides a connected stream for one request and its answer: `with link as stream`. Connects when needed.

    For one thread at a time; only `close` may be called from another. After any error except InferenceError it
    disconnects, since the rest of an answer may still be in the stream; likewise if `keep` is False at the end.

    - `timeout_s`: limit of each exchange (see `TensorStream`), and of connecting (5 s at most).
    - `trust`: the certificates to accept; None for a connection without TLS.
    """

    def __init__(self, endpoint: tuple[str, int], timeout_s: float, trust: Trust | None = None) -> None:
        self.keep = False
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._trust = trust
        self._stream: TensorStream | None = None
        self._in_use = threading.Lock()
        self._closed = False

    def __enter__(self) -> TensorStream:
        """Raise OSError when connecting fails, ProtocolError when unread bytes are left in the stream."""
        self._in_use.acquire()
        self.keep = False
        try:
            stream = self._connected()
            stream.begin()
        except BaseException:
            self._end()
            raise
        self.keep = True
        return stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, InferenceError):
            self.keep = False
        self._end()

    def close(self) -> None:
        """Disconnect for good. An exchange in another thread raises OSError at once."""
        self._closed = True
        stream = self._stream
        if stream is not None:
            stream.abort()
        if self._in_use.acquire(blocking=False):  # else the thread that uses it closes it
            self._disconnect()
            self._in_use.release()

    def _end(self) -> None:
        if not self.keep:
            self._disconnect()
        self._in_use.release()
        if self._closed:  # by another thread, which could not disconnect during the exchange
            self._disconnect()

    def _connected(self) -> TensorStream:
        if self._stream is None and not self._closed:
            connected = socket.create_connection(self._endpoint, min(self._timeout_s, _CONNECT_TIMEOUT_S))
            if self._trust is None:
                self._stream = TensorStream(connected, self._timeout_s)
            else:
                self._stream = open_tls(connected, self._trust, self._endpoint[0], self._timeout_s)
        if self._stream is None or self._closed:
            raise ConnectionAbortedError(
                f"the connection to teacher {self._endpoint[0]}:{self._endpoint[1]} was closed"
            )
        return self._stream

    def _disconnect(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


# Shared memory

MIN_SHARED_BYTES = 256 * 1024
"""Smaller requests go through the socket, which is as fast for them (measured: equal at 128 to 256 KB)."""

log = get_logger(__name__)


class SharedMemoryUse:
    """One connection's shared memory: made for the first large request, replaced for a larger one or a new stream."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._offered = False
        self._region: ClientRegion | None = None
        self._stream: TensorStream | None = None

    def note_signature(self, signature: ModelSignature) -> ModelSignature:
        """Note whether the teacher offers shared memory; return the signature without that extension."""
        offered = SHARED_MEMORY_EXTENSION in signature.extensions
        self._offered = offered and hasattr(os, "memfd_create")
        if not offered:
            return signature
        extensions = tuple(one for one in signature.extensions if one != SHARED_MEMORY_EXTENSION)
        return msgspec.structs.replace(signature, extensions=extensions)

    def is_worthwhile(self, size: int) -> bool:
        """Whether to try shared memory for a request of `size` bytes."""
        return self._offered and MIN_SHARED_BYTES <= size <= MAX_REGION_BYTES - TENSORS_START

    def registered(self, stream: TensorStream, size: int) -> ClientRegion | None:
        """Return the region that is registered through `stream`, if it has room for `size` bytes."""
        has_room = self._region is not None and self._stream is stream and self._region.room >= size
        return self._region if has_room else None

    def create(self, stream: TensorStream, size: int) -> ClientRegion | None:
        """Return a region to register through `stream`; None if it can't work, and then it is not tried again."""
        self.release()
        if not stream.is_local:
            self._offered = False
            return None
        try:
            self._region, self._stream = ClientRegion(size), stream
        except OSError as error:
            self.disable(error)
        return self._region

    def disable(self, cause: Exception | str) -> None:
        log.info("teacher.memory_not_shared", teacher=self._address, cause=str(cause))
        self._offered = False
        self.release()

    def release(self) -> None:
        """Release the region, which is freed once no request uses it."""
        self._region = self._stream = None
