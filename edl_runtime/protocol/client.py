"""The student's end of the wire: one connection to one teacher.

Written for large tensors: `sendmsg` takes the arrays as they lie in memory, `recv_into` fills the arrays that the
caller gets, and nothing is copied on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import msgspec
import numpy as np

from edl_runtime.decoding import Decoder
from edl_runtime.errors import InferenceError, ProtocolError
from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.body import JSON_LIMIT, Buffer, Encoded
from edl_runtime.protocol.http import CONTENT_LENGTH, JSON_SIZE, PREDICTOR_DIED, RUN_ALONE, ResponseHead, render_request
from edl_runtime.protocol.link import Link
from edl_runtime.protocol.oip import ModelSignature, Normalise, TopK, answered_names
from edl_runtime.protocol.region import REGISTER_PATH, Region, refer_to_region
from edl_runtime.protocol.requests import encode_request
from edl_runtime.protocol.responses import open_response
from edl_runtime.protocol.sharing import Sharing
from edl_runtime.protocol.stream import Stream
from edl_runtime.protocol.tensors import Array, Tensor
from edl_runtime.protocol.tls import Trust
from edl_runtime.settings import check_token

__all__ = ["TeacherConnection", "Tensor"]

ANSWER_LIMIT = 1 << 30
"""Most bytes of an answer."""

_REFUSED_FOR_NOW = frozenset({408, 429})


class TeacherConnection:
    """A blocking keep-alive connection to a teacher that speaks the Open Inference Protocol v2 over HTTP/1.1.

    For one thread at a time; only `close` may come from another. It opens by itself when first used. After an
    OSError or ProtocolError it is disconnected, and the next call connects anew.

    - `address`: "host:port".
    - `model`: the name under which the teacher serves.
    - `timeout_s`: limit of each call, and of connecting (which gets 5 s at most).
    - `trust`: what is asked of the teacher's certificate; None for a connection without TLS.
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
        """Raise SpecError unless `address` and `token` are such. Connects to nothing yet."""
        self.address = address
        self._link = Link(endpoint_of(address), timeout_s, trust)
        self._model_path = f"/v2/models/{quote(model, safe='')}"
        self._headers: dict[str, str | int] = {"Host": address}
        if token:
            self._headers["Authorization"] = f"Bearer {check_token('token', token)}"
        self._sharing = Sharing(address)
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
        """Disconnect for good. Safe from another thread, whose call under way raises OSError at once."""
        self._link.close()
        self._sharing.forget()

    def ready(self) -> bool:
        """Whether the teacher takes requests for its model. Raises OSError, ProtocolError."""
        with self._link as stream:
            status, _ = self._get(stream, f"{self._model_path}/ready")
            return status == 200

    def signature(self) -> ModelSignature:
        """Return what the model takes and answers. Raises InferenceError, OSError, ProtocolError."""
        with self._link as stream:
            status, body = self._get(stream, self._model_path)
            if status != 200:
                raise self._refusal(status, body)
            try:
                signature = _signature_decoder.decode(body)
            except msgspec.DecodeError as error:
                raise ProtocolError(f"teacher {self.address}: its model metadata is not usable: {error}") from None
        return self._sharing.learn(signature)

    def infer(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[str | TopK],
        normalise: Mapping[str, Normalise] = MappingProxyType({}),
        *,
        alone: bool = False,
    ) -> dict[str, Array]:
        """Return the model's `outputs` (empty: all) for `inputs`, as fresh writable arrays.

        `normalise` names inputs that are uint8, and says how the teacher makes of them the float32 that its model
        takes. An answer has two arrays for a `TopK`; see there. With `alone`, nothing else is run together with this.

        A sequence of rows is sent as one tensor without stacking it first. Don't change the inputs during the call.
        Large inputs go to a teacher on this machine in shared memory, if it has said in its `signature` that it can.

        Raises InferenceError when the teacher refuses (the connection stays usable), ProtocolError when inputs can't
        be sent or the answer is not what was asked for, TimeoutError and other OSErrors when the network fails.
        """
        encoded = encode_request(inputs, outputs, normalise)
        arrays = self._exchange_shared(encoded, alone=alone) or self._exchange(*encoded, alone=alone)
        for name in (name for wish in outputs for name in answered_names(wish)):
            if name not in arrays:
                raise ProtocolError(f"teacher {self.address} left out output {name!r}")
        return arrays

    def _exchange_shared(self, request: Encoded, *, alone: bool) -> dict[str, Array] | None:
        """Ask with the inputs in shared memory; None if that doesn't pay or work."""
        region = self._region_for(request.size)
        if region is None:
            return None
        region.write(request.buffers)
        header = refer_to_region(request.header)
        try:
            return self._exchange(header, [], len(header), alone=alone)
        except InferenceError as refused:
            if refused.status != 400:
                raise
            self._sharing.give_up(refused)  # if that was not the reason, the same comes again
            return None

    def _exchange(self, header: bytes, buffers: Sequence[Array], size: int, *, alone: bool = False) -> dict[str, Array]:
        head = self._infer_head(len(header), size, alone=alone)
        with self._link as stream:
            stream.send([head, header, *buffers], len(head) + size)
            known = self._last_answer
            if known is not None and stream.take(known.text):
                arrays = {name: np.empty(shape, dtype) for name, dtype, shape in known.arrays}
                unfilled: Iterable[Array] = arrays.values()
            else:
                arrays, unfilled = self._open_answer(stream)
            for array in unfilled:
                stream.fill(array)
        return arrays

    def _open_answer(self, stream: Stream) -> tuple[dict[str, Array], list[Array]]:
        """Read an answer up to its binary tensors; return all arrays, and those that these fill, in order.

        It is remembered: the teacher's next answer most probably differs in nothing but the numbers that follow.
        """
        head = stream.read_head()
        answer, size = self._checked_head(head)
        if answer.status != 200:
            died = PREDICTOR_DIED in answer.headers
            raise self._refusal(answer.status, self._read_json(stream, size), predictor_died=died)
        json_size = answer.size(JSON_SIZE)
        json_size = size if json_size is None else min(json_size, size)
        text = bytes(self._read_json(stream, json_size))
        arrays, unfilled = open_response(text, size - json_size)
        if len(unfilled) == len(arrays) and answer.keep_alive:
            shapes = [(name, array.dtype, array.shape) for name, array in arrays.items()]
            self._last_answer = _KnownAnswer(head + text, shapes)
        return arrays, unfilled

    def _region_for(self, size: int) -> Region | None:
        """Return memory shared with the teacher for a request of `size` bytes; None if it goes through the socket."""
        if not self._sharing.pays(size):
            return None
        try:
            with self._link as stream:
                region = self._sharing.registered(stream, size)
                if region is None and (region := self._sharing.create(stream, size)) is not None:
                    with region.offered() as registration:
                        self._register(stream, registration)
        except (InferenceError, ProtocolError) as refused:
            self._sharing.give_up(refused)
            return None
        return region

    def _register(self, stream: Stream, registration: bytes) -> None:
        headers = {**self._headers, "Content-Type": "application/json", "Content-Length": len(registration)}
        request = render_request("POST", REGISTER_PATH, headers)
        stream.send([request, registration], len(request) + len(registration))
        answer, size = self._checked_head(stream.read_head())
        body = self._read_json(stream, size)
        if answer.status != 200:
            raise self._refusal(answer.status, body)
        if not answer.keep_alive:
            raise ProtocolError(f"teacher {self.address} has registered shared memory and disconnects")

    def _get(self, stream: Stream, path: str) -> tuple[int, memoryview]:
        request = render_request("GET", path, self._headers)
        stream.send([request], len(request))
        answer, size = self._checked_head(stream.read_head())
        return answer.status, self._read_json(stream, size)

    def _infer_head(self, json_size: int, size: int, *, alone: bool) -> bytes:
        """Return the head of a request; that of the last one, if it was as large."""
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

    def _checked_head(self, head: bytes) -> tuple[ResponseHead, int]:
        answer = ResponseHead(head)
        self._link.keep = answer.keep_alive
        size = answer.size(CONTENT_LENGTH)
        if size is None or size > ANSWER_LIMIT:
            given = "no Content-Length" if size is None else f"{size} bytes"
            raise ProtocolError(f"teacher {self.address} answers {given}, allowed are {ANSWER_LIMIT} bytes")
        return answer, size

    def _read_json(self, stream: Stream, size: int) -> memoryview:
        if size > JSON_LIMIT:
            raise ProtocolError(f"teacher {self.address} answers {size} bytes of JSON, allowed are {JSON_LIMIT}")
        return stream.read(size)

    def _refusal(self, status: int, body: Buffer, *, predictor_died: bool = False) -> InferenceError:
        try:
            reason = _refusal_decoder.decode(body).error
        except msgspec.DecodeError:
            reason = bytes(body[:200]).decode("utf-8", "replace") or "no reason given"
        retryable = status >= 500 or status in _REFUSED_FOR_NOW
        return InferenceError(self.address, status, reason, retryable=retryable, predictor_died=predictor_died)


class _KnownAnswer(NamedTuple):
    """An answer of which all arrays are binary: its `text` up to them, and name, dtype and shape of each."""

    text: bytes
    arrays: list[tuple[str, np.dtype[Any], tuple[int, ...]]]


class _Refusal(msgspec.Struct):
    error: str


# Made while one thread imports this: msgspec crashes when several threads are the first to decode a type.
_signature_decoder = Decoder(ModelSignature)
_refusal_decoder = Decoder(_Refusal)
