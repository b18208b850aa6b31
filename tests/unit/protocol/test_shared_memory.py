"""Requests whose inputs lie in shared memory."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import pytest

from edl_runtime.protocol.client import MIN_SHARED_BYTES, SharedMemoryUse
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.infer_messages import InferRequest, decode_request, decode_response, encode_request
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.protocol.shared_memory import (
    MAX_REGION_BYTES,
    REGION_NAME,
    SHARED_MEMORY_EXTENSION,
    TENSORS_START,
    point_to_region,
)

SIGNATURE = ModelSignature(
    name="teacher",
    inputs=(TensorSpec("x", "FP32", (-1, 4)), TensorSpec("ids", "INT64", (-1,))),
    outputs=(TensorSpec("y", "FP32", (-1,)),),
)
INPUTS = {"x": np.arange(8, dtype=np.float32).reshape(2, 4), "ids": np.array([5, 6])}


def region_of(buffers: list[Any]) -> bytearray:
    return bytearray(TENSORS_START) + b"".join(bytes(one) for one in buffers)


def decode(header: bytes, region: bytearray | None) -> InferRequest:
    shared = None if region is None else memoryview(region).toreadonly()
    return decode_request(memoryview(header), len(header), SIGNATURE, shared)


def changed(header: bytes, name: str = "x", **parameters: Any) -> bytes:
    """Return the JSON with parameters of one tensor changed."""
    request = msgspec.json.decode(header)
    for tensor in request["inputs"]:
        if tensor["name"] == name:
            tensor["parameters"] |= parameters
    return msgspec.json.encode(request)


@pytest.fixture
def header() -> bytes:
    return point_to_region(encode_request(INPUTS, ["y"]).header)


@pytest.fixture
def region() -> bytearray:
    return region_of(encode_request(INPUTS, ["y"]).buffers)


def test_inputs_are_found_where_the_student_put_them(header: bytes, region: bytearray) -> None:
    """Each tensor has its offset; the rest of the request is unchanged."""
    request = decode(header, region)
    assert {name: array.tolist() for name, array in request.inputs.items()} == {
        name: array.tolist() for name, array in INPUTS.items()
    }
    assert request.outputs == {"y": True}


def test_what_may_be_an_index_is_copied(header: bytes, region: bytearray) -> None:
    """A student that changes shared memory meanwhile can't get a checked index past the check; floats may change."""
    request = decode(header, region)
    region[TENSORS_START:] = b"\xff" * (len(region) - TENSORS_START)
    assert request.inputs["ids"].tolist() == [5, 6]
    assert np.isnan(request.inputs["x"]).all()
    assert not request.inputs["x"].flags.writeable


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"shared_memory_region": "another"}, "not registered through this connection"),
        ({"shared_memory_offset": -1}, "offset"),
        ({"shared_memory_offset": TENSORS_START + 17}, "offset"),
        ({"shared_memory_offset": 2**62}, "offset"),
        ({"shared_memory_byte_size": 16}, "byte_size"),
        ({"shared_memory_byte_size": None}, "byte_size"),
        ({"binary_data_size": 32}, "byte_size"),
    ],
)
def test_what_lies_elsewhere_is_refused(
    parameters: dict[str, Any], reason: str, header: bytes, region: bytearray
) -> None:
    """Nothing but the connection's own region is read, from its first byte to its last."""
    with pytest.raises(ProtocolError, match=reason):
        decode(changed(header, **parameters), region)


def test_without_a_region_none_can_be_named(header: bytes) -> None:
    """The memory that another connection has registered is out of reach."""
    with pytest.raises(ProtocolError, match="not registered through this connection"):
        decode(header, None)


def test_a_teacher_can_not_answer_in_shared_memory() -> None:
    """Answers come through the socket; a student maps no memory that a teacher names."""
    parameters = {"shared_memory_region": REGION_NAME, "shared_memory_offset": 0, "shared_memory_byte_size": 8}
    output = {"name": "y", "datatype": "FP32", "shape": [2], "parameters": parameters}
    with pytest.raises(ProtocolError, match="not registered through this connection"):
        decode_response(msgspec.json.encode({"outputs": [output]}), 0)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is for Linux")
def test_memory_is_shared_for_what_is_worth_it_and_fits() -> None:
    """Only while the teacher offers it, and until it fails."""
    sharing = SharedMemoryUse("h:1")
    sizes = (
        MIN_SHARED_BYTES - 1,
        MIN_SHARED_BYTES,
        MAX_REGION_BYTES - TENSORS_START,
        MAX_REGION_BYTES - TENSORS_START + 1,
    )
    assert not any(sharing.is_worthwhile(size) for size in sizes)
    assert sharing.note_signature(
        msgspec.structs.replace(SIGNATURE, extensions=("top_k", SHARED_MEMORY_EXTENSION))
    ).extensions == ("top_k",)
    assert [sharing.is_worthwhile(size) for size in sizes] == [False, True, True, False]
    sharing.disable("it is refused")
    assert not any(sharing.is_worthwhile(size) for size in sizes)
