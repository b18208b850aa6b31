"""Whatever comes from the network is understood or refused; nothing else happens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edl_runtime.errors import ProtocolError
from edl_runtime.protocol.http import JSON_SIZE, RequestHead, ResponseHead, render_request, render_response
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.protocol.requests import decode_request, encode_request
from edl_runtime.protocol.responses import encode_response, open_response

SIGNATURE = ModelSignature(
    name="m", inputs=(TensorSpec("x", "INT8", (-1, -1)),), outputs=(TensorSpec("y", "FP32", (-1,)),)
)

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
sizes = st.integers(-1, 9) | st.sampled_from([2**31, 2**62, 2**64, 10**30])
tensors = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "y"]),
        "datatype": st.sampled_from(["INT8", "FP32", "BYTES", "BF16"]) | st.text(max_size=4),
        "shape": st.lists(sizes, max_size=3) | anything,
    },
    optional={
        "data": st.lists(st.integers(-200, 200), max_size=9) | anything,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": sizes, "binary_data": st.booleans()}),
    },
)
headers = st.one_of(
    st.fixed_dictionaries({"inputs": st.lists(tensors, max_size=2)}, optional={"outputs": anything, "id": anything}),
    st.fixed_dictionaries({"outputs": st.lists(tensors, max_size=2)}, optional={"model_name": anything}),
    anything,
)


def small(header: Any) -> bytes:
    """JSON of `header`; numbers beyond 64 bits as digits, as a peer may well send them."""
    return msgspec.json.encode(header, enc_hook=str)


def damaged(good: bytes, seed: int) -> Iterator[bytes]:
    """`good` with a few bytes changed, cut out or doubled, many times over: what hypothesis would take minutes for."""
    chance = random.Random(seed)
    for _ in range(100):
        bad = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(bad))
            piece = chance.choice([b"", b'"', b"[", b"-", b"\xff", b"\r\n", b"9" * 25, bytes(bad[at : at + 9])])
            bad[at : at + chance.randint(0, 3)] = piece
        yield bytes(bad)


def answer_request(body: bytes, json_size: int | None) -> None:
    request = decode_request(memoryview(body), json_size, SIGNATURE)
    assert request.inputs["x"].dtype == np.int8
    assert request.inputs["x"].ndim == 2
    encode_response(SIGNATURE, request, {"y": np.zeros(1, np.float32)}, memoryview(bytearray(2048)))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_damaged_messages_are_read_or_refused(seed: int) -> None:
    """A message with a few wrong bytes is understood or raises ProtocolError."""
    good, rows, _ = encode_request({"x": np.ones((2, 3), np.int8)}, ["y"])
    for header in damaged(good, seed):
        with suppress(ProtocolError):
            answer_request(header + rows[0].tobytes(), len(header))
    answer = b'{"outputs":[{"name":"y","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}}]}'
    for header in damaged(answer, seed):
        with suppress(ProtocolError):
            open_response(header, 8)
    for head in damaged(render_request("POST", "/v2", {"Content-Length": 5, "Host": "a"}), seed):
        with suppress(ProtocolError):
            RequestHead(head)
    for head in damaged(render_response(200, {"Content-Length": 5, "Connection": "close"}), seed):
        with suppress(ProtocolError):
            ResponseHead(head)


@settings(max_examples=150, deadline=None)
@given(header=headers.map(small) | st.binary(max_size=80), payload=st.binary(max_size=12), cut=st.integers(-2, 200))
def test_any_body_is_decoded_or_refused(header: bytes, payload: bytes, cut: int) -> None:
    """A request is ProtocolError or arrays that fit the signature; and what fits can be answered."""
    for json_size in (None, len(header), cut):
        with suppress(ProtocolError):
            answer_request(header + payload, json_size)


@settings(max_examples=150, deadline=None)
@given(header=headers.map(small) | st.binary(max_size=80), payload=sizes)
def test_any_answer_is_opened_or_refused(header: bytes, payload: int) -> None:
    """An answer is ProtocolError or arrays whose bytes are those that follow."""
    with suppress(ProtocolError):
        arrays, unfilled = open_response(header, payload)
        assert sum(array.nbytes for array in unfilled) == payload
        assert len(arrays) >= len(unfilled)


lines = st.lists(
    st.sampled_from(
        [
            b"GET /v2 HTTP/1.1",
            b"HTTP/1.1 200 OK",
            b"Content-Length: 5",
            b"Transfer-Encoding: chunked",
            b"Connection: upgrade",
            b"Upgrade: h2c",
            b"Inference-Header-Content-Length: \xff",
            b" folded",
        ]
    )
    | st.binary(max_size=20),
    max_size=5,
).map(lambda parts: b"\r\n".join(parts) + b"\r\n\r\n")


@settings(max_examples=150, deadline=None)
@given(head=lines | st.binary(max_size=60))
def test_any_head_is_read_or_refused(head: bytes) -> None:
    """A head is ProtocolError or has a method or status and sizes that are numbers."""
    for kind in (RequestHead, ResponseHead):
        with suppress(ProtocolError):
            assert (kind(head).size(JSON_SIZE) or 0) >= 0
