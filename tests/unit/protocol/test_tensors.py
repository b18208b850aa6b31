"""numpy arrays to and from the bodies of the Open Inference Protocol v2."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from edl_runtime.protocol.errors import AnswerLimitError, ProtocolError
from edl_runtime.protocol.infer_messages import (
    JSON_LIMIT,
    EncodedRequest,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from edl_runtime.protocol.oip import Datatype, ModelSignature, TensorSpec
from edl_runtime.protocol.tensors import Array, datatype_of, dtype_of

SIGNATURE = ModelSignature(
    name="teacher",
    versions=("1",),
    inputs=(TensorSpec("image", "FP32", (-1, 4)), TensorSpec("ids", "INT64", (-1,))),
    outputs=(TensorSpec("logits", "FP32", (-1, 2)), TensorSpec("best", "INT64", (-1,))),
)
IMAGE = np.arange(12, dtype=np.float32).reshape(3, 4)
IDS = np.array([7, 8, 9])


def body_of(encoded: EncodedRequest) -> memoryview:
    return memoryview(encoded.header + b"".join(np.asarray(part).tobytes() for part in encoded.buffers))


def json_body(**changes: Any) -> memoryview:
    """A request in plain JSON, with some fields of its first input changed."""
    image = {"name": "image", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]} | changes
    image = {name: value for name, value in image.items() if value is not None}
    ids = {"name": "ids", "datatype": "INT64", "shape": [1], "data": [5]}
    return memoryview(msgspec.json.encode({"id": "a", "inputs": [image, ids]}))


def answer_with(outputs: dict[str, Array], binary: dict[str, bool]) -> dict[str, Array]:
    """Send `outputs` through both ends of the wire."""
    area = memoryview(bytearray(4096))
    request = decode_request(json_body(), None, SIGNATURE)._replace(outputs=binary)
    json_size, size = encode_response(SIGNATURE, request, outputs, area)
    json_size = size if json_size is None else json_size
    arrays, unfilled = decode_response(area[:json_size], size - json_size)
    for array in unfilled:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(area[json_size:size], np.uint8)[: array.nbytes]
        json_size += array.nbytes
    return arrays


@pytest.mark.parametrize("dtype", ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"])
def test_every_datatype_has_its_dtype_and_back(dtype: str) -> None:
    """dtype_of is the inverse of datatype_of."""
    assert dtype_of(datatype_of(np.dtype(dtype))) == np.dtype(dtype)


@pytest.mark.parametrize("dtype", ["S3", "c8", "O", "M8[s]", ">f4"])
def test_a_dtype_without_a_name_is_refused(dtype: str) -> None:
    """Texts, objects and foreign byte orders can't be sent, and the error names what can."""
    with pytest.raises(ProtocolError, match="allowed are"):
        encode_request({"image": np.zeros(2, dtype)}, [])


def test_a_request_arrives_as_it_was_sent() -> None:
    """Inputs are equal, read-only and in place, for they come aligned; the outputs are the wanted ones, binary."""
    encoded = encode_request({"image": IMAGE, "ids": IDS}, ["best"])
    body = body_of(encoded)
    request = decode_request(body, len(encoded.header), SIGNATURE)
    assert encoded.size == len(body)
    assert np.array_equal(request.inputs["image"], IMAGE)
    assert np.array_equal(request.inputs["ids"], IDS)
    assert request.outputs == {"best": True}
    assert not request.inputs["image"].flags.writeable
    assert np.shares_memory(request.inputs["image"], np.frombuffer(body, np.uint8))


@pytest.mark.parametrize("width", [4, 1024])
def test_rows_travel_as_one_tensor(width: int) -> None:
    """Small and large rows, contiguous or not, arrive stacked."""
    signature = msgspec.structs.replace(SIGNATURE, inputs=(TensorSpec("image", "FP32", (-1, width)),))
    wide = np.arange(6 * width, dtype=np.float32).reshape(3, 2 * width)
    rows = [wide[0, ::2], wide[1, ::2].copy(), wide[2, ::2]]
    encoded = encode_request({"image": rows}, [])
    request = decode_request(body_of(encoded), len(encoded.header), signature)
    assert np.array_equal(request.inputs["image"], wide[:, ::2])
    assert request.outputs == {"logits": True, "best": True}


def test_large_rows_are_not_copied() -> None:
    """A row that is contiguous goes to the socket as it is."""
    rows = [np.zeros(4096, np.float32), np.ones(4096, np.float32)]
    assert [part is row for part, row in zip(encode_request({"x": rows}, []).buffers, rows, strict=True)] == [True] * 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([np.zeros(3), np.zeros(4)], r"row 1 is float64\[4\], allowed is float64\[3\]"),
        ([np.zeros(3), np.zeros(3, np.float32)], r"row 1 is float32\[3\]"),
    ],
)
def test_rows_that_differ_are_refused(rows: list[Array], message: str) -> None:
    """No row is cut, padded or cast to make it fit."""
    with pytest.raises(ProtocolError, match=message):
        encode_request({"image": rows}, [])


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1.0, 2.0, 3.0, 4.0]]])
def test_json_tensors_come_flat_or_nested(data: list[Any]) -> None:
    """Both forms that the protocol allows give the same array."""
    request = decode_request(json_body(data=data), None, SIGNATURE)
    assert np.array_equal(request.inputs["image"], [[1, 2, 3, 4]])
    assert request.inputs["image"].dtype == np.float32
    assert (request.id, request.outputs) == ("a", {"logits": False, "best": False})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "picture"}, "input 'picture' is unknown; the model takes image, ids"),
        ({"name": "ids", "datatype": "INT64", "shape": [1], "data": [1]}, "input 'ids' comes twice"),
        ({"datatype": "INT32"}, "input 'image': datatype is 'INT32', the model takes FP32"),
        ({"datatype": "BYTES"}, "the model takes FP32"),
        ({"shape": [1, 5]}, r"input 'image': shape is \[1, 5\], the model takes \[-1, 4\]"),
        ({"shape": [4]}, "the model takes"),
        ({"shape": [-1, 4]}, "of 0 or more"),
        ({"shape": [0] * 40}, "at most 32 axes"),
        ({"data": [1, 2, 3]}, "data is not FP32 numbers of shape"),
        ({"data": [1, 2, 3, "4"]}, "data is not FP32 numbers"),
        ({"data": [1, 2, [3], 4]}, "data is not FP32 numbers"),
        ({"data": [True] * 4}, "data is not FP32 numbers"),
        ({"data": None}, "neither data nor parameters.binary_data_size"),
        ({"data": None, "parameters": {"binary_data_size": 15}}, "binary_data_size is 15, its shape .* make 16"),
        ({"data": None, "parameters": {"binary_data_size": 16}}, "0 bytes follow the JSON, .* make 16"),
        ({"parameters": {"binary_data_size": 16}}, "data must be absent"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    """The error names the input, what was given and what is allowed."""
    with pytest.raises(ProtocolError, match=message):
        decode_request(json_body(**changes), None, SIGNATURE)


def array_of(datatype: Datatype, data: Any, shape: int) -> Array:
    """Return what a teacher makes of a JSON tensor."""
    signature = msgspec.structs.replace(SIGNATURE, inputs=(TensorSpec("x", datatype, (-1,)),))
    tensor = {"name": "x", "datatype": datatype, "shape": [shape], "data": data}
    return decode_request(memoryview(json.dumps({"inputs": [tensor]}).encode()), None, signature).inputs["x"]


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("INT8", [128]),
        ("UINT8", [-1]),
        ("INT64", [2**63]),
        ("INT32", [1.5]),
        ("INT32", [1.0]),
        ("INT32", [True]),
        ("INT32", [1, True]),
        ("FP32", [0.5, True]),
        ("FP32", [1e39]),
        ("FP16", [65520]),
        ("FP64", [10**400]),
        ("BOOL", [1]),
        ("FP32", [None]),
        ("FP32", 1),
        ("FP32", {}),
        ("FP32", ""),
    ],
)
def test_a_number_that_its_datatype_can_not_hold_is_refused(datatype: Datatype, data: Any) -> None:
    """Nothing wraps around, overflows, is cut off or taken for something else."""
    with pytest.raises(ProtocolError, match=f"input 'x': data is not {datatype}"):
        array_of(datatype, data, len(data) if hasattr(data, "__len__") else 1)


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("UINT64", [2**64 - 1, 1]),
        ("INT64", [2**63 - 1, -(2**63)]),
        ("BOOL", [True, False]),
        ("FP64", [2**53, 0.1]),
        ("FP32", [16777216, -3.4028234663852886e38]),
        ("FP16", [65504]),
        ("UINT8", []),
    ],
)
def test_a_number_that_its_datatype_can_hold_arrives(datatype: Datatype, data: list[float]) -> None:
    """To the last bit, whichever other numbers stand beside it."""
    assert array_of(datatype, data, len(data)).tolist() == data


def test_a_number_of_floating_point_is_rounded_to_the_nearest() -> None:
    """As every decimal is, and a whole number like any other."""
    assert array_of("FP32", [0.1, 16777217], 2).tolist() == [float(np.float32(0.1)), 16777216]


@pytest.mark.parametrize(
    ("inputs", "outputs", "json_size", "message"),
    [
        ({"image": IMAGE}, [], None, "input ids is missing; the model takes image, ids"),
        ({"image": IMAGE, "ids": IDS}, ["worst"], None, "output 'worst' is unknown; the model has logits, best"),
        ({"image": IMAGE, "ids": IDS}, [], 10_000, "Inference-Header-Content-Length"),
    ],
)
def test_a_request_that_does_not_fit_the_model_is_refused(
    inputs: dict[str, Array], outputs: list[str], json_size: int | None, message: str
) -> None:
    """It names what is missing or unknown, and what there is; more JSON than there is body can't be."""
    encoded = encode_request(inputs, outputs)
    with pytest.raises(ProtocolError, match=message):
        decode_request(body_of(encoded), json_size or len(encoded.header), SIGNATURE)


def test_answers_arrive_as_they_were_sent() -> None:
    """Binary and JSON outputs of one answer come back equal, writable and with their dtypes."""
    outputs: dict[str, Array] = {"logits": np.array([[0.5, 1.5]], np.float32), "best": np.array([1])}
    for binary in ({"logits": True, "best": False}, {"best": True, "logits": True}, {"logits": False}):
        arrays = answer_with(outputs, binary)
        assert list(arrays) == list(binary)
        for name, array in arrays.items():
            assert np.array_equal(array, outputs[name])
            assert array.dtype == outputs[name].dtype
            assert array.flags.writeable
    assert answer_with({"best": np.zeros((0,), np.int64)}, {"best": True})["best"].shape == (0,)


def test_an_answer_larger_than_its_area_is_refused() -> None:
    """An answer over the limit is an error, not a cut-off answer."""
    for binary in (True, False):
        with pytest.raises(AnswerLimitError, match="allowed are 4096"):
            answer_with({"best": np.zeros(5000, np.int64)}, {"best": binary})


def test_an_answer_of_too_many_numbers_is_refused_before_they_are_written() -> None:
    """A JSON answer that nobody would read takes no memory, in objects many times its own."""
    request = decode_request(json_body(), None, SIGNATURE)._replace(outputs={"best": False})
    many = np.broadcast_to(np.int64(1), (JSON_LIMIT,))
    with pytest.raises(AnswerLimitError, match=f"allowed are {JSON_LIMIT}"):
        encode_response(SIGNATURE, request, {"best": many}, memoryview(bytearray(2 * JSON_LIMIT)))


def test_an_output_that_comes_twice_is_refused() -> None:
    """Which of the two is meant, nobody knows."""
    tensor = {"name": "y", "datatype": "FP32", "shape": [1], "data": [1]}
    with pytest.raises(ProtocolError, match="output 'y' comes twice"):
        decode_response(msgspec.json.encode({"outputs": [tensor, tensor]}), 0)


def test_an_answer_of_another_size_than_it_says_is_refused() -> None:
    """A client takes no memory for an answer whose header and length disagree."""
    tensor = {"name": "y", "datatype": "FP32", "shape": [2**40], "parameters": {"binary_data_size": 2**42}}
    with pytest.raises(ProtocolError, match="8 bytes follow the JSON"):
        decode_response(msgspec.json.encode({"outputs": [tensor]}), 8)
