"""Members and the comparison of models."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from edl_runtime.errors import SpecError
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.registry.members import Member, differences

DIGITS = ModelSignature(
    name="teacher",
    platform="paddle",
    versions=("abc",),
    inputs=(TensorSpec("image", "FP32", (-1, 784)),),
    outputs=(TensorSpec("logits", "FP32", (-1, 10)), TensorSpec("features", "FP32", (-1, 64))),
)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_is_a_number_above_zero(weight: float) -> None:
    """A teacher without weight could get no share."""
    with pytest.raises(SpecError, match="weight"):
        Member(id="a", address="h:1", weight=weight)


def test_a_student_wants_at_least_one_teacher() -> None:
    """A student that wants none is not a student."""
    with pytest.raises(SpecError, match="want"):
        Member(id="a", address="h:1", want=0)


def test_a_member_travels_as_json() -> None:
    """What is written to Redis reads back as the same member."""
    member = Member(id="a", address="h:1", weight=2.0, signature=DIGITS, fence=7)
    assert msgspec.json.decode(msgspec.json.encode(member), type=Member) == member


def test_a_model_does_not_differ_from_itself() -> None:
    """No words when nothing differs."""
    assert differences(DIGITS, DIGITS) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "other"}, "name is other and the pool's teacher"),
        ({"platform": ""}, "platform is empty and the pool's paddle"),
        ({"versions": ("abd",)}, "versions is abd and the pool's abc"),
        (
            {"inputs": (TensorSpec("image", "UINT8", (-1, 784)),)},
            "input 'image' is UINT8 [-1, 784] and the pool's FP32 [-1, 784]",
        ),
        ({"outputs": DIGITS.outputs[:1]}, "output 'features' is missing and the pool's FP32 [-1, 64]"),
        ({"extensions": ("top_k",)}, "extensions is top_k and the pool's empty"),
        ({"outputs": DIGITS.outputs[::-1]}, "outputs is features, logits and the pool's logits, features"),
    ],
)
def test_each_difference_is_named(change: dict[str, Any], words: str) -> None:
    """A person sees which field differs and both its values."""
    assert differences(DIGITS, msgspec.structs.replace(DIGITS, **change)) == [words]
