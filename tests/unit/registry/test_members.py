"""Members, the comparison of their models, who asks whom, and when a lease is renewed."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from edl_runtime.errors import SpecError
from edl_runtime.protocol.llm import LlmServer, llm_signature
from edl_runtime.protocol.oip import JOIN_EXTENSION, ModelSignature, TensorSpec
from edl_runtime.registry.lease import hold_lease, pause_s
from edl_runtime.registry.members import Member, assign_teachers, signature_differences
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import connect

DIGITS = ModelSignature(
    name="teacher",
    platform="paddle",
    versions=("abc",),
    inputs=(TensorSpec("image", "FP32", (-1, 784)),),
    outputs=(TensorSpec("logits", "FP32", (-1, 10)), TensorSpec("features", "FP32", (-1, 64))),
)
TEACHERS = [Member(id=name, address=f"{name}:1") for name in "abc"]


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_is_a_number_above_zero(weight: float) -> None:
    """A teacher without weight could get no share."""
    with pytest.raises(SpecError, match="weight"):
        Member(id="a", address="h:1", weight=weight)


def test_a_student_wants_at_least_one_teacher() -> None:
    """A student that wants none is not a student."""
    with pytest.raises(SpecError, match="want"):
        Member(id="a", address="h:1", want=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "other"}, "name is other and the pool's teacher"),
        ({"platform": "onnx"}, "platform is onnx and the pool's paddle"),
        ({"versions": ("abd",)}, "versions is abd and the pool's abc"),
        (
            {"inputs": (TensorSpec("image", "UINT8", (-1, 784)),)},
            "input 'image' is UINT8 [-1, 784] and the pool's FP32 [-1, 784]",
        ),
        ({"outputs": DIGITS.outputs[:1]}, "output 'features' is missing and the pool's FP32 [-1, 64]"),
        ({"extensions": ("top_k",)}, "extensions is top_k and the pool's empty"),
        (
            {"extensions": (JOIN_EXTENSION,)},
            "--max-batch is above 1 and the pool's 1; start all its teachers with 1, or all with more",
        ),
        ({"outputs": DIGITS.outputs[::-1]}, "outputs is features, logits and the pool's logits, features"),
    ],
)
def test_each_difference_is_named(change: dict[str, Any], words: str) -> None:
    """A person sees which field differs and both its values."""
    assert signature_differences(DIGITS, msgspec.structs.replace(DIGITS, **change)) == [words]


def test_another_tokenizer_is_another_model() -> None:
    """Its numbers mean other words; a server that tells no tokenizer may have any."""
    ours, theirs = (msgspec.structs.replace(DIGITS, extensions=(f"tokenizer:{digest}",)) for digest in ("a1", "b2"))
    assert signature_differences(ours, theirs) == ["tokenizer is b2 and the pool's a1"]
    assert not signature_differences(ours, DIGITS)


def test_a_language_model_s_server_tells_its_tokenizer_where_the_pool_has_one() -> None:
    """Else another model's scores would reach students; in a pool that has none it may have any."""
    known, unknown = (llm_signature("m", LlmServer(kind="vllm"), digest) for digest in (("tokenizer:a1",), ()))
    told = "tokenizer is unknown (name its folder by --tokenizer) and the pool's a1"
    assert signature_differences(known, unknown) == [told]
    assert signature_differences(unknown, known) == []


def test_a_server_that_is_not_ours_may_lack_name_platform_and_versions() -> None:
    """Whichever came first; its inputs and outputs have to be the pool's."""
    theirs = msgspec.structs.replace(DIGITS, name="", platform="", versions=())
    assert not signature_differences(DIGITS, theirs)
    assert not signature_differences(theirs, DIGITS)
    assert signature_differences(theirs, msgspec.structs.replace(DIGITS, outputs=DIGITS.outputs[:1]))


def test_the_later_of_two_entries_counts() -> None:
    """A student knows best what it wants, whatever an older list says."""
    shared = assign_teachers(TEACHERS, [Member(id="s", address="here"), Member(id="s", address="here", want=1)])
    assert len(shared["s"]) == 1


def test_a_student_without_usable_teachers_gets_others_too() -> None:
    """As long as one of its own is good, nothing changes; and with no good one in the pool neither."""
    students = [Member(id=name, address="here") for name in "stu"]
    plain = assign_teachers(TEACHERS, students)
    [mine] = plain["s"]
    borrowing = assign_teachers(TEACHERS, students, {"s": {mine}})
    assert mine in borrowing["s"]
    assert len(borrowing["s"]) == 2
    assert {**borrowing, "s": (mine,)} == plain
    assert assign_teachers(TEACHERS, students, {"s": {"d:1"}}) == plain
    assert assign_teachers(TEACHERS, students, {"s": {"a:1", "b:1", "c:1"}}) == plain


@pytest.mark.parametrize(
    ("ttl_s", "took_s", "away", "pause"),
    [
        pytest.param(0.9, 0.0, False, 0.3, id="every third of a lease"),
        pytest.param(60.0, 0.0, False, 1.0, id="a long lease once a second"),
        pytest.param(60.0, 0.0, True, 0.5, id="sooner while Redis is away"),
        pytest.param(0.9, 0.0, True, 0.3, id="a short one no later then"),
        pytest.param(3.0, 0.25, False, 0.75, id="counted from the beginning of the try before"),
        pytest.param(3.0, 1.5, True, 0.0, id="at once after an answer that took as long"),
    ],
)
def test_a_lease_is_renewed_in_time(ttl_s: float, took_s: float, pause: float, *, away: bool) -> None:
    """A Redis that was emptied has everybody back within a second, and one slow answer costs no lease."""
    assert pause_s(ttl_s, took_s, away=away) == pytest.approx(pause)


async def test_a_lease_needs_a_length() -> None:
    """A lease of no time would have run out before it began."""
    async with connect("redis://127.0.0.1:1/0") as client:
        with pytest.raises(SpecError, match="lease_ttl_s"):
            hold_lease(client, Service("n", "pool"), Member(id="a", address="a:1"), ttl_s=0)
