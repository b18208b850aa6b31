"""Messages of tables, beside those of generated code."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from edl_runtime.protocol.proto import message_classes

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
