"""Which requests run as one, and how they are put together and taken apart."""

from __future__ import annotations

import numpy as np
import pytest

from edl_runtime.protocol.infer_messages import InferRequest
from edl_runtime.protocol.oip import ModelSignature, Normalise, TensorSpec, TopK
from edl_runtime.protocol.tensors import Array
from edl_runtime.teacher.predictor.batcher import QueuedRequest, next_group
from edl_runtime.teacher.predictor.execute import can_join, joined_inputs, needed_outputs, split_outputs

SIGNATURE = ModelSignature(
    name="m",
    inputs=(TensorSpec("image", "FP32", (-1, 2)), TensorSpec("ids", "INT64", (-1,))),
    outputs=(TensorSpec("logits", "FP32", (-1, 3)),),
)


def request(images: Array, ids: Array | None = None, **normalise: Normalise) -> InferRequest:
    ids = np.zeros(len(images), np.int64) if ids is None else ids
    return InferRequest("", {"image": images, "ids": ids}, {"logits": True}, ("logits",), normalise)


def waiting(*rows: int, width: int = 2) -> list[QueuedRequest]:
    requests = [request(np.zeros((size, width), np.float32)) for size in rows]
    return [QueuedRequest.of(slot, one, SIGNATURE) for slot, one in enumerate(requests)]


@pytest.mark.parametrize(
    ("rows", "joined"),
    [
        ([4], [4]),
        ([4, 4], [4, 4]),
        ([4, 4, 4], [4, 4]),  # twelve rows would be one more batch size to warm up
        ([4] * 7, [4] * 4),
        ([4] * 20, [4] * 16),  # 64 rows are the most
        ([16, 32, 16], [16, 32, 16]),
        ([32, 16, 16], [32, 16, 16]),
        ([4, 4, 3, 4], [4, 4]),
        ([3, 4, 4], [3]),
        ([100, 4], [100]),  # larger than the most, it runs alone
        ([0, 0], [0]),
    ],
)
def test_a_group_has_the_rows_of_its_first_times_a_power_of_two(rows: list[int], joined: list[int]) -> None:
    """As many as fit, in order; the first runs in any case."""
    assert [one.rows for one in next_group(waiting(*rows), 64)] == joined


def test_requests_of_another_form_are_passed_over() -> None:
    """They stay where they are, and those behind them may run earlier, with the first."""
    wide = [QueuedRequest.of(9, request(np.zeros((4, 3), np.float32)), SIGNATURE)]
    narrow = waiting(4, 4)
    assert next_group([narrow[0], *wide, narrow[1]], 64) == narrow
    assert next_group([*wide, *narrow], 64) == wide


def test_inputs_of_different_lengths_run_alone() -> None:
    """Where inputs don't agree in their first axis, nobody knows which one is the batch."""
    odd = QueuedRequest.of(0, request(np.zeros((4, 2), np.float32), np.zeros(3, np.int64)), SIGNATURE)
    assert next_group([odd, odd], 64) == [odd]


@pytest.mark.parametrize(
    ("inputs", "outputs", "joins"),
    [((-1, 2), (-1,), True), ((8, 2), (-1,), False), ((-1, 2), (8,), False), ((), (-1,), False), ((-1,), (), False)],
)
def test_only_free_batches_are_joined(inputs: tuple[int, ...], outputs: tuple[int, ...], *, joins: bool) -> None:
    """A model with a fixed or without a batch axis answers one request at a time."""
    signature = ModelSignature(
        name="m", inputs=(TensorSpec("x", "FP32", inputs),), outputs=(TensorSpec("y", "FP32", outputs),)
    )
    assert can_join(signature) == joins
    assert not can_join(ModelSignature(name="m"))


def test_what_one_alone_sends_is_not_copied() -> None:
    """The model gets the very arrays."""
    image = np.ones((2, 2), np.float32)
    assert joined_inputs([request(image)], SIGNATURE)["image"] is image


@pytest.mark.parametrize("requests", [1, 2])
def test_no_model_writes_into_what_it_is_given(requests: int) -> None:
    """However inputs have come, so that a model which writes to them fails at once, joined or not."""
    pixels = [request(np.zeros((1, 2), np.uint8), image=Normalise((1.0,), (2.0,)))] * requests
    numbers = [request(np.zeros((1, 2), np.float32))] * requests
    given = [array for some in (pixels, numbers) for array in joined_inputs(some, SIGNATURE).values()]
    assert not any(array.flags.writeable for array in given)


def test_inputs_are_joined_in_order_and_normalised_on_the_way() -> None:
    """A request with pixels and one with numbers run as one."""
    pixels = request(np.full((1, 2), 5, np.uint8), np.array([1]), image=Normalise((1.0,), (2.0,)))
    numbers = request(np.full((2, 2), 7, np.float32), np.array([2, 3]))
    joined = joined_inputs([pixels, numbers], SIGNATURE)
    assert joined["image"].tolist() == [[2, 2], [7, 7], [7, 7]]
    assert joined["image"].dtype == np.float32
    assert joined["ids"].tolist() == [1, 2, 3]
    assert joined_inputs([pixels], SIGNATURE)["image"].tolist() == [[2, 2]]


def test_outputs_are_taken_apart_in_order() -> None:
    """Each request gets its rows of each output."""
    parts = split_outputs({"a": np.arange(3), "b": np.arange(6).reshape(3, 2)}, [1, 2])
    assert [{name: array.tolist() for name, array in part.items()} for part in parts] == [
        {"a": [0], "b": [[0, 1]]},
        {"a": [1, 2], "b": [[2, 3], [4, 5]]},
    ]


@pytest.mark.parametrize("shape", [(), (2,), (4, 3)])
def test_an_output_without_all_rows_is_not_taken_apart(shape: tuple[int, ...]) -> None:
    """Nobody knows whose its numbers are."""
    with pytest.raises(ValueError, match="for 3 rows"):
        split_outputs({"a": np.zeros(shape)}, [1, 2])


def test_the_model_gives_what_any_of_them_needs_once() -> None:
    """An output and its largest are made of the same."""
    one, other = (request(np.zeros((1, 2), np.float32)) for _ in range(2))
    assert needed_outputs([one, other._replace(requested=(TopK("logits", 2), "best"))]) == ["logits", "best"]
