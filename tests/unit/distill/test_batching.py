"""How a source's items become requests, and requests items again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.teachers.fakes import SIGNATURE, arithmetic

from edl_runtime.distill.batching import Batch, Format, Request, cut, join
from edl_runtime.distill.bindings import SMALL_ROW_BYTES, RequestPlan, Tokenizer
from edl_runtime.distill.errors import SampleError
from edl_runtime.errors import SpecError
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.oip import Datatype, ModelSignature, Normalise, TensorSpec, TopK
from edl_runtime.protocol.tensors import Array, dtype_of

PLAN = RequestPlan.of(["x", "label"], ["double", "sum"], {}, SIGNATURE)


def plan_for(*inputs: TensorSpec) -> RequestPlan:
    """That of a model with these inputs."""
    signature = ModelSignature(name="m", inputs=inputs, outputs=(TensorSpec("y", "FP32", (-1,)),))
    return RequestPlan.of([spec.name for spec in inputs], ["y"], {}, signature)


def answered(batch: Batch, requests: list[Request]) -> Batch:
    """Answer the requests as a good teacher does."""
    batch.answers = ([arithmetic(np.asarray(request.inputs["x"])) for request in requests],)
    return batch


def images(rows: int) -> Array:
    return np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)


def cut_one(kind: Format, item: Any, plan: RequestPlan = PLAN, size: int | None = 4) -> tuple[Batch, list[Request]]:
    batch, (requests,) = cut(kind, item if kind == "sample" else [item], [plan], 7, size=size)
    return batch, requests


def test_a_batch_gets_its_predictions_behind_all_its_slots() -> None:
    """Format batch yields the source's arrays themselves, then one array [B, …] for each output, in order."""
    x, label = images(10), np.arange(10)
    batch, requests = cut_one("batch", (x, label))
    assert [request.rows for request in requests] == [4, 4, 2]
    assert all(np.shares_memory(request.inputs["x"], x) for request in requests)
    (item,) = join("batch", answered(batch, requests))
    assert item[0] is x
    assert item[1] is label
    np.testing.assert_array_equal(item[2], x * 2)
    np.testing.assert_array_equal(item[3], x.sum(axis=1))


@pytest.mark.parametrize("container", [tuple, list])
def test_a_list_of_samples_keeps_its_length(container: type) -> None:
    """Format sample_list yields a list of tuples, each sample with its own row of each prediction."""
    x = images(10)
    batch, requests = cut_one("sample_list", [container([row, number]) for number, row in enumerate(x)])
    assert [request.rows for request in requests] == [4, 4, 2]
    (samples,) = join("sample_list", answered(batch, requests))
    assert [int(sample[1]) for sample in samples] == list(range(10))
    assert all(isinstance(sample[1], np.ndarray) for sample in samples)
    np.testing.assert_array_equal([sample[2] for sample in samples], x * 2)
    np.testing.assert_array_equal([sample[3] for sample in samples], x.sum(axis=1))


def test_single_samples_share_a_request() -> None:
    """In format sample a request takes samples of several items."""
    x = images(10)
    batch, requests = cut_one("sample", [(row, number) for number, row in enumerate(x)][4:8])
    assert [request.rows for request in requests] == [4]
    items = list(join("sample", answered(batch, requests)))
    np.testing.assert_array_equal([item[2] for item in items], x[4:8] * 2)


@pytest.mark.parametrize("kind", ["batch", "sample_list"])
@pytest.mark.parametrize(
    ("rows", "mib_a_row", "parts"),
    [
        (0, 0.25, []),
        (1, 0.25, [1]),
        (32, 0.25, [32]),
        (33, 0.25, [17, 16]),
        (3, 9.0, [1, 1, 1]),
        (64, 1e-3, [64]),
        (65, 1e-3, [33, 32]),
        (150, 1e-3, [50, 50, 50]),
    ],
)
def test_requests_are_as_large_as_pays(kind: Format, rows: int, mib_a_row: float, parts: list[int]) -> None:
    """At most 64 rows and 8 MiB, and alike: of two unlike ones the larger keeps the script waiting."""
    width = int(mib_a_row * (1 << 18))
    whole = np.broadcast_to(np.float32(1), (rows, width))
    item: Any = (whole,) if kind == "batch" else [(row,) for row in whole]
    _, requests = cut_one(kind, item, plan_for(TensorSpec("x", "FP32", (-1, width))), None)
    assert [request.rows for request in requests] == parts


@pytest.mark.parametrize("kind", ["batch", "sample_list"])
def test_joined_items_are_delivered_one_by_one(kind: Format) -> None:
    """One request has the rows of several items, and each item gets the answers to its own rows."""
    x, label = images(9), np.arange(9)
    spans = [slice(0, 2), slice(2, 6), slice(6, 6), slice(6, 9)]
    items: Any = [(x[span], label[span]) for span in spans]
    if kind == "sample_list":
        items = [list(zip(*slots, strict=True)) for slots in items]
    batch, ((request,),) = cut(kind, items, [PLAN], 7)
    assert batch.name == "batches 7 to 10"
    found = list(join(kind, answered(batch, [request])))
    assert len(found) == len(items)
    for item, span in zip(found, spans, strict=True):
        rows = item if kind == "sample_list" else list(zip(*item, strict=True))
        assert [int(row[1]) for row in rows] == label[span].tolist()
        np.testing.assert_array_equal(np.reshape([row[2] for row in rows], (-1, 4)), x[span] * 2)
        np.testing.assert_array_equal([row[3] for row in rows], x[span].sum(axis=1))


@pytest.mark.parametrize("kind", ["batch", "sample_list"])
def test_items_of_several_shapes_are_not_joined(kind: Format) -> None:
    """Rows of any size make one array if they are of one size."""
    plan = plan_for(TensorSpec("x", "FP32", (-1, -1)))
    items: Any = [(np.zeros((2, width), np.float32),) for width in (3, 4)]
    if kind == "sample_list":
        items = [[(row,) for row in slots[0]] for slots in items]
    with pytest.raises(SampleError):
        cut(kind, items, [plan], 0)


def test_large_rows_are_not_copied() -> None:
    """Rows above the measured limit go to the socket as they lie in memory; smaller ones become one array."""
    width = SMALL_ROW_BYTES // 4
    for extra, copied in ((0, True), (1, False)):
        plan = plan_for(TensorSpec("x", "FP32", (-1, width + extra)))
        rows = [np.zeros(width + extra, np.float32) for _ in range(3)]
        _, (request,) = cut_one("sample_list", [(row,) for row in rows], plan)
        assert isinstance(request.inputs["x"], np.ndarray) is copied
        assert (
            any(np.shares_memory(row, sent) for row, sent in zip(rows, request.inputs["x"], strict=True)) is not copied
        )


@pytest.mark.parametrize("kind", ["batch", "sample_list"])
def test_a_slot_of_another_shape_with_as_many_values_is_reshaped_on_the_way(kind: Format) -> None:
    """The teachers get their shape, the student gets its own back."""
    x = images(3).reshape(3, 2, 2)
    item: Any = (x, np.arange(3)) if kind == "batch" else [(row, 0) for row in x]
    batch, (request,) = cut_one(kind, item)
    np.testing.assert_array_equal(np.asarray(request.inputs["x"]), x.reshape(3, 4))
    (joined,) = join(kind, answered(batch, [request]))
    assert (joined[0] if kind == "batch" else joined[0][0]).shape[-2:] == (2, 2)


def test_plain_numbers_and_lists_become_arrays() -> None:
    """Python's own values become arrays of numpy's choice, before they are checked as any others."""
    plan = plan_for(TensorSpec("ids", "INT64", (-1, 3)), TensorSpec("n", "INT64", (-1,)))
    _, (request,) = cut_one("sample_list", [([1, 2, 3], 4), ([5, 6, 7], 8)], plan)
    np.testing.assert_array_equal(np.asarray(request.inputs["ids"]), [[1, 2, 3], [5, 6, 7]])
    np.testing.assert_array_equal(np.asarray(request.inputs["n"]), [4, 8])


@pytest.mark.parametrize("kind", ["batch", "sample_list"])
def test_rows_that_are_not_contiguous_are_sent_right(kind: Format) -> None:
    """A view that skips values is copied once, in its own order."""
    x = np.arange(24, dtype=np.float32).reshape(3, 8)[:, ::2]
    item: Any = (x, np.arange(3)) if kind == "batch" else [(row, 0) for row in x]
    _, (request,) = cut_one(kind, item)
    np.testing.assert_array_equal(np.asarray(request.inputs["x"]), x)


@pytest.mark.parametrize("kind", ["batch", "sample_list"])
def test_an_empty_batch_is_delivered_empty(kind: Format) -> None:
    """No rows make no request, and predictions of no rows."""
    item: Any = (images(0), np.arange(0)) if kind == "batch" else []
    batch, requests = cut_one(kind, item)
    assert requests == []
    (joined,) = join(kind, batch)
    assert [array.shape for array in joined] == ([(0, 4), (0,), (0, 4), (0,)] if kind == "batch" else [])


X = np.zeros(4, np.float32)
WRONG: list[tuple[Format, Any, str]] = [
    ("sample_list", [(X, 0), (np.zeros(4), 0)], r"'x' of sample 1 of batch 7: got float64 \[4\].*float32 \[4\]"),
    ("sample_list", [(X, 0), (X[:3], 0)], r"'x' of sample 1 of batch 7: got float32 \[3\].*float32 \[4\]"),
    ("sample_list", [(X[:3], 0), (np.zeros(5, np.float32), 0)], "'x' of sample 0 of batch 7"),
    ("sample_list", [(X, 0), (X,)], "'item' of sample 1 of batch 7: got 1 slots.*2 slots: x, label"),
    ("sample_list", [(X, 0), X], "'item' of sample 1 of batch 7: got ndarray.*a tuple of 2 slots"),
    ("sample_list", [(X, [[1], [2, 3]])], "'item' of sample 0 of batch 7: got a slot that is no array"),
    ("sample_list", X, "'item' of batch 7: got ndarray.*a list of samples"),
    ("batch", (images(3).astype(np.float64), 0), r"'x' of batch 7: got float64 \[4\].*float32 \[4\]"),
    ("batch", (images(3)[:, :3], 0), r"'x' of batch 7: got float32 \[3\]"),
    ("batch", (np.float32(1), 0), "'x' of batch 7: got a single value"),
    ("batch", (images(3), 0, 0), "'item' of batch 7: got 3 slots"),
    ("batch", {"x": images(3)}, "'item' of batch 7: got dict"),
]


@pytest.mark.parametrize(("kind", "item", "text"), WRONG)
def test_a_wrong_item_is_named(kind: Format, item: Any, text: str) -> None:
    """The error says which slot of which sample or batch, what was given and what the teachers take."""
    with pytest.raises(SampleError, match=text):
        cut_one(kind, item)


def test_feeds_of_one_batch_have_as_many_rows() -> None:
    """Two arrays of different lengths are no batch."""
    plan = plan_for(TensorSpec("a", "FP32", (-1, 4)), TensorSpec("b", "FP32", (-1, 4)))
    with pytest.raises(SampleError, match=r"'b' of batch 7: got 2 rows.*as many as 'a' has"):
        cut_one("batch", (images(3), images(2)), plan)


def test_free_sizes_are_any_size_and_one_in_a_batch() -> None:
    """-1 in the model's shape takes rows of any length, the same for all of a source's list."""
    plan = plan_for(TensorSpec("ids", "INT64", (-1, -1)))
    _, (request,) = cut_one("sample_list", [([1, 2],), ([3, 4],)], plan)
    assert np.asarray(request.inputs["ids"]).shape == (2, 2)
    with pytest.raises(SampleError, match=r"sample 1 of batch 7.*one shape"):
        cut_one("sample_list", [([1, 2],), ([3],)], plan)


@pytest.mark.parametrize(
    ("inputs", "outputs", "normalise", "text"),
    [
        (["image"], ["sum"], {}, r"inputs: got .*'image'.*'x' among them"),
        (["x"], ["logits"], {}, r"outputs: got 'logits'.*double, sum"),
        (["x"], [TopK("double", 2)], {}, r"outputs: got TopK\(name='double', k=2\).*model 'teacher'.* have no top_k"),
        (["x"], ["double"], {"x": Normalise(1, 1)}, "normalise: got 'x'.*model 'teacher'.* have no normalise"),
    ],
)
def test_what_the_model_lacks_is_named(
    inputs: list[str | None], outputs: list[str | TopK], normalise: dict[str, Normalise], text: str
) -> None:
    """With what there is."""
    with pytest.raises(SpecError, match=text):
        RequestPlan.of(inputs, outputs, normalise, SIGNATURE)


def test_tokens_of_another_tokenizer_are_refused() -> None:
    """The error names both sides. Teachers that tell no tokenizer are not refused."""
    ours = Tokenizer(Path("words/tokenizer.json"), "a1")
    signature = msgspec.structs.replace(SIGNATURE, extensions=("tokenizer:b2",))
    refused = r"tokenizer: got 'words/tokenizer.json \(digest a1\)'.*'teacher' \(digest b2\)"
    with pytest.raises(SpecError, match=refused):
        RequestPlan.of(["x"], ["double"], {}, signature, tokenizer=ours)
    for told in ((), ("tokenizer:a1",)):
        RequestPlan.of(["x"], ["double"], {}, msgspec.structs.replace(SIGNATURE, extensions=told), tokenizer=ours)


@pytest.mark.parametrize(
    "answers",
    [
        {"double": np.zeros((3, 4), np.float32), "sum": np.zeros(2, np.float32)},
        {"double": np.zeros((2, 4), np.float64), "sum": np.zeros(2, np.float32)},
        {"double": np.zeros((2, 5), np.float32), "sum": np.zeros(2, np.float32)},
    ],
)
def test_answers_to_something_else_are_not_taken(answers: dict[str, Array]) -> None:
    """A teacher that answers another number of rows, dtype or shape has failed."""
    with pytest.raises(ProtocolError, match="requested was"):
        PLAN.check("a:1", answers, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["FP16", "FP32", "FP64"])
def test_answers_with_nan_or_infinity_are_taken_only_if_allowed(bad: float, dtype: Datatype) -> None:
    """A single one among many counts, in any kind of float; the error says how to have them."""
    signature = ModelSignature(
        name="m", inputs=(TensorSpec("x", "FP32", (-1, 4)),), outputs=(TensorSpec("y", dtype, (-1, 1000)),)
    )
    y = np.zeros((128, 1000), dtype_of(dtype))
    y[127, 999] = bad
    with pytest.raises(ProtocolError, match=r"teacher a:1: output 'y' has NaN or infinity.*allow_nan=True"):
        RequestPlan.of(["x"], ["y"], {}, signature).check("a:1", {"y": y}, 128)
    RequestPlan.of(["x"], ["y"], {}, signature, allow_nan=True).check("a:1", {"y": y}, 128)
