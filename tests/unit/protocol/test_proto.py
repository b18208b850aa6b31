"""Messages of tables, beside those of generated code."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError

from edl_runtime.protocol import proto
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.oip_grpc import MESSAGES
from edl_runtime.protocol.paddle_serving import GENERAL, OLD_GENERAL
from edl_runtime.protocol.proto import memory_of, message_classes, parsed

CLASSES = message_classes(
    "test",
    {
        "Parameter": {"flag": "1? bool", "number": "2? int64"},
        "Tensor": {"name": "1 string", "shape": "3 repeated int64", "parameters": "4 map Parameter", "raw": "7 bytes"},
        "Request": {"tensors": "2 repeated Tensor", "share": "3 float"},
    },
)


def test_bytes_are_those_of_the_wire_format() -> None:
    """Written by hand from https://protobuf.dev/programming-guides/encoding."""
    request = CLASSES["Request"](share=0.5)
    tensor = request.tensors.add(name="x", shape=[1, 300], raw=b"ab")
    tensor.parameters["k"].number = 5
    entry = b"\x0a\x01k\x12\x02\x10\x05"
    inner = b"\x0a\x01x" + b"\x1a\x03\x01\xac\x02" + b"\x22" + bytes([len(entry)]) + entry + b"\x3a\x02ab"
    sent = b"\x12" + bytes([len(inner)]) + inner + b"\x1d\x00\x00\x00\x3f"
    assert request.SerializeToString() == sent
    assert CLASSES["Request"].FromString(sent) == request


def test_one_of_several_fields_is_set() -> None:
    parameter = CLASSES["Parameter"](flag=True)
    parameter.number = 3
    assert not parameter.HasField("flag")


def test_packages_of_one_name_do_not_clash() -> None:
    """Generated code of another library may have the same."""
    other = message_classes("test", {"Tensor": {"title": "1 string"}})
    assert other["Tensor"](title="y").SerializeToString() == CLASSES["Tensor"](name="y").SerializeToString()


def test_unknown_fields_are_skipped_and_broken_bytes_refused() -> None:
    assert CLASSES["Tensor"].FromString(b"\x9a\x06\x01z\x0a\x01x").name == "x"
    with pytest.raises(DecodeError):
        CLASSES["Tensor"].FromString(b"\x0a\x05x")


INFER = MESSAGES["ModelInferRequest"]


def field(number: int, content: bytes) -> bytes:
    """Return a field of bytes, or one message in another."""
    size, encoded = len(content), b""
    while size > 127:
        size, encoded = size >> 7, encoded + bytes([size & 127 | 128])
    return bytes([number << 3 | 2]) + encoded + bytes([size]) + content


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (INFER, b"\x32\x00" * 2_000_000),  # outputs
        (INFER, field(5, b"\x22\x00" * 2_000_000)),  # parameters of one input
        (INFER, b"\x3a\x00" * 2_000_000),  # raw_input_contents
        (INFER, b"\xf8\x01\x00" * 2_000_000),  # a field that nobody knows
        (GENERAL["Request"], b"\x0a\x00" * 2_000_000),
        (GENERAL["Request"], b"\x12\x00" * 2_000_000),  # names
        (OLD_GENERAL["Request"], field(1, b"\x0a\x00" * 2_000_000)),  # tensors of one instance
    ],
)
def test_a_message_of_many_small_fields_is_refused_before_it_is_parsed(message: Any, content: bytes) -> None:
    """Each is two bytes long and takes up to 165 in memory."""
    with pytest.raises(ProtocolError, match="has more than 32768 fields"):
        memory_of(message, content, "the request")
    with pytest.raises(ProtocolError, match="the request has more than 32768 fields"):
        parsed(message, content, "the request")


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (GENERAL["Request"], field(1, field(1, b"\1" * 1001))),
        (GENERAL["Request"], field(1, b"\x08\1" * 501)),
        (OLD_GENERAL["Request"], field(1, field(1, b"\x25abcd" * 201))),
    ],
)
def test_lists_that_are_read_number_by_number_have_a_limit(
    message: Any, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other thread runs meanwhile, and a byte may become fifteen."""
    assert len(parsed(message, content, "it").SerializeToString()) > 0
    monkeypatch.setattr(proto, "LISTS_LIMIT", 1000)
    with pytest.raises(ProtocolError, match="more than 1000 bytes of numbers in lists; send tensors as raw bytes"):
        parsed(message, content, "it")


def test_lists_of_many_numbers_are_parsed_as_they_were_sent() -> None:
    """Clients before 0.7 send each number as a field of its own, so that these are no fields to count."""
    request = OLD_GENERAL["Request"]()
    tensor = request.insts.add().tensor_array.add(float_data=[0.5] * 200_000)
    heads = b"".join(b"\x25" + bytes(tensor.SerializeToString()[-4:]) for _ in range(200_000))
    sent = field(1, field(1, heads)) * 3
    found = parsed(OLD_GENERAL["Request"], sent, "it")
    assert [list(one.tensor_array[0].float_data) for one in found.insts] == [[0.5] * 200_000] * 3
    assert len(sent) <= memory_of(OLD_GENERAL["Request"], sent, "it") < 2 * len(sent)


def test_memory_is_reckoned_for_whole_numbers_of_one_byte() -> None:
    assert memory_of(GENERAL["Request"], field(1, field(1, b"\1" * 1_000_000)), "it") > 14_000_000
    assert memory_of(INFER, field(7, bytes(1_000_000)), "it") < 1_100_000


@pytest.mark.parametrize("content", [b"\x0b\x0c", b"\x0a\x05x", b"\x0a", b"\xff" * 11, b"\x0d\1"])
def test_what_is_no_message_is_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"the request is no inference\.ModelInferRequest"):
        parsed(INFER, content, "the request")
