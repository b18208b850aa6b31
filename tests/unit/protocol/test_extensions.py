"""What a student may ask beyond the standard: the largest of an output, and normalisation on the teacher's side."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from edl_runtime.errors import SpecError
from edl_runtime.protocol import oip
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.infer_messages import InferRequest, decode_request, encode_request
from edl_runtime.protocol.oip import ModelSignature, Normalise, TensorSpec, TopK, response_names

SIGNATURE = ModelSignature(
    name="teacher",
    inputs=(TensorSpec("image", "FP32", (-1, 3, -1)), TensorSpec("ids", "INT64", (-1,))),
    outputs=(TensorSpec("logits", "FP32", (-1, 10)), TensorSpec("best", "INT64", (-1,))),
)
IDS = np.array([7, 8])
PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)


def sent(pixels: Any, outputs: list[str | TopK], **normalise: Normalise) -> InferRequest:
    """What a teacher makes of a student's request."""
    header, buffers, *_ = encode_request({"image": pixels, "ids": IDS}, outputs, normalise)
    body = header + b"".join(part.tobytes() for part in buffers)
    return decode_request(memoryview(body), len(header), SIGNATURE)


def request_with(image: dict[str, Any], *outputs: dict[str, Any]) -> memoryview:
    """A request whose first input and outputs say what a careless client may."""
    image = {"name": "image", "datatype": "UINT8", "shape": [1, 3, 1], "data": [1, 2, 3]} | image
    ids = {"name": "ids", "datatype": "INT64", "shape": [1], "data": [5]}
    return memoryview(msgspec.json.encode({"inputs": [image, ids], "outputs": outputs}))


def test_the_largest_of_an_output_are_two_tensors_of_the_answer() -> None:
    """The output itself may be asked for beside them."""
    request = sent(np.zeros((2, 3, 2), np.float32), [TopK("logits", 4), "logits"])
    assert request.outputs == {"logits.values": True, "logits.indices": True, "logits": True}
    assert request.requested == (TopK("logits", 4), "logits")
    assert response_names(TopK("logits", 4)) + response_names("logits") == tuple(request.outputs)


def test_an_image_travels_as_bytes_with_what_normalises_it() -> None:
    """The teacher gets the pixels and what to do with them."""
    how = Normalise((1.0, 2.0, 3.0), (4.0,))
    request = sent(PIXELS, ["best"], image=how)
    assert request.normalise == {"image": how}
    assert np.array_equal(request.inputs["image"], PIXELS)


def test_only_bytes_are_normalised() -> None:
    """The error is raised before anything is sent."""
    with pytest.raises(ProtocolError, match=r"'image' is float32; an input to normalise has to be uint8"):
        sent(np.zeros((2, 3, 2), np.float32), [], image=Normalise((0.0,), (1.0,)))


NORMAL = {"mean": [0.0], "std": [1.0]}


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({}, "datatype is 'UINT8', the model takes FP32 or UINT8 to normalise"),
        ({"datatype": "FP32", "parameters": {"normalise": NORMAL}}, "datatype is 'FP32' to normalise"),
        ({"parameters": {"normalise": NORMAL | {"std": [0]}}}, "numbers other than 0"),
        ({"parameters": {"normalise": NORMAL | {"std": [1e-40]}}}, "numbers other than 0"),
        ({"parameters": {"normalise": NORMAL | {"std": []}}}, "one for each channel"),
        ({"parameters": {"normalise": NORMAL | {"mean": [1e39]}}}, "one for each channel"),
        ({"parameters": {"normalise": NORMAL | {"axis": 0}}}, "0 is the batch"),
        ({"parameters": {"normalise": NORMAL | {"axis": 3}}}, "normalise.axis is 3, allowed is below 3"),
        ({"parameters": {"normalise": NORMAL | {"mean": [1, 2]}}}, "2 channels, there are 3 channels on axis 1"),
        ({"parameters": {"normalise": {"mean": [1, 2, 3], "std": [1, 2]}}}, "one number, or 3 as in mean"),
        ({"parameters": {"normalise": {"mean": [1]}}}, "std"),
    ],
)
def test_what_can_not_be_normalised_is_refused(image: dict[str, Any], message: str) -> None:
    """The error names what is wrong with it."""
    with pytest.raises(ProtocolError, match=message):
        decode_request(request_with(image), None, SIGNATURE)


def test_an_input_of_another_datatype_can_not_be_normalised() -> None:
    """Only what the model takes as FP32."""
    ids = {"name": "ids", "datatype": "UINT8", "shape": [1], "data": [5], "parameters": {"normalise": NORMAL}}
    with pytest.raises(ProtocolError, match="'ids': datatype is 'UINT8' to normalise, the model takes INT64"):
        decode_request(memoryview(msgspec.json.encode({"inputs": [ids]})), None, SIGNATURE)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([("logits", 11)], "'logits': top_k is 11, allowed is at most 10"),
        ([("logits", 0)], "Expected `int` >= 1"),
        ([("logits", "all")], "Expected"),
        ([("best", 1)], "'best': top_k needs an axis behind the batch"),
        ([("none", 1)], "output 'none' is unknown"),
        ([("logits", 2), ("logits", 3)], r"output 'logits\.values' is requested twice"),
    ],
)
def test_a_top_k_that_can_not_be_is_refused(outputs: list[tuple[str, Any]], message: str) -> None:
    """Too many, none at all, of an output that has one number a sample, or twice."""
    requested = [{"name": name, "parameters": {"top_k": k}} for name, k in outputs]
    with pytest.raises(ProtocolError, match=message):
        decode_request(request_with({"datatype": "FP32"}, *requested), None, SIGNATURE)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TopK("logits", 0), "top_k.k"),
        (lambda: TopK("logits", "3"), "top_k.k"),  # type: ignore[arg-type]
        (lambda: TopK("logits", 2.5), "top_k.k"),  # type: ignore[arg-type]
        (lambda: TopK("logits", True), "top_k.k"),
        (lambda: TopK(None, 3), "top_k.name"),  # type: ignore[arg-type]
        (lambda: Normalise("abc", 1), "normalise.mean"),  # type: ignore[arg-type]
        (lambda: Normalise(1, ("1",)), "normalise.std"),  # type: ignore[arg-type]
        (lambda: Normalise(1, None), "normalise.std"),  # type: ignore[arg-type]
        (lambda: Normalise(1, 0), "normalise.std"),
        (lambda: Normalise((0.0,), (math.inf,)), "normalise.std"),
        (lambda: Normalise(1, 1, "1"), "normalise.axis"),  # type: ignore[arg-type]
        (lambda: Normalise(1, 1, 1.0), "normalise.axis"),  # type: ignore[arg-type]
        (lambda: Normalise(1, 1, 0), "normalise.axis"),
    ],
)
def test_a_wish_of_the_wrong_kind_is_said_by_its_field(make: Callable[[], object], field: str) -> None:
    """Where it is written, and not when the first batch is sent."""
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.field == field


def test_numbers_may_be_numpys_and_one_does_for_all_channels() -> None:
    """What is sent and hashed is Python's own."""
    assert sent(np.zeros((2, 3, 2), np.float32), [TopK("logits", np.int64(4))]).requested == (TopK("logits", 4),)
    one = Normalise(np.float32(127.5), 127.5, np.int64(1))
    assert (one, one.channels) == (Normalise((127.5,), (127.5,)), 1)
    assert sent(PIXELS, [], image=one).normalise == {"image": one}
    assert hash(Normalise([127.5], 127.5)) == hash(one)  # type: ignore[arg-type]  # a list, as users write it
    each = Normalise(np.array([1, 2, 3]), np.float32([4, 5, 6]))
    assert each == Normalise((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))


def test_millions_of_numbers_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes as JSON are Python's own; to ask each of a stranger's what it is took four seconds a million."""

    def look(given: object) -> float:
        raise AssertionError(given)

    monkeypatch.setattr(oip, "_number", look)
    image = {"parameters": {"normalise": {"mean": [1] * 1_000_000, "std": [2.0]}}}
    with pytest.raises(ProtocolError, match="numbers for 1000000 channels, there are 3 channels"):
        decode_request(request_with(image), None, SIGNATURE)
    with pytest.raises(SpecError, match=r"normalise\.mean"):
        Normalise((1.0, math.nan), (1.0,))
