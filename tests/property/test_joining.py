"""The groups in which requests run, for any queue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.protocol.infer_messages import InferRequest
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.teacher.predictor.batcher import QueuedRequest, next_group
from edl_runtime.teacher.predictor.execute import joined_inputs, split_outputs

SIGNATURE = ModelSignature(name="m", inputs=(TensorSpec("x", "FP32", (-1, -1)),))
QUEUES = st.lists(st.tuples(st.integers(0, 9) | st.just(4), st.sampled_from([2, 2, 2, 3])), min_size=1, max_size=20)


def queue(sizes: Sequence[tuple[int, int]]) -> list[QueuedRequest]:
    """Requests of so many rows of such a width; each number says whose it is."""
    arrays = [np.full(size, number, np.float32) for number, size in enumerate(sizes)]
    requests = [InferRequest("", {"x": array}, {}, (), {}) for array in arrays]
    return [QueuedRequest.of(slot, request, SIGNATURE) for slot, request in enumerate(requests)]


@given(sizes=QUEUES, most_rows=st.integers(1, 64))
def test_a_group_keeps_its_promises(sizes: list[tuple[int, int]], most_rows: int) -> None:
    """The first is in it, the others in order and of its form, none twice; together they are as many as said."""
    waiting = queue(sizes)
    group = next_group(waiting, most_rows)
    slots = [one.slot for one in group]
    rows = sum(one.rows for one in group)
    assert slots[0] == 0
    assert slots == sorted(set(slots))
    assert {one.form for one in group} == {waiting[0].form}
    assert len(group) == 1 or rows <= most_rows
    assert rows == waiting[0].rows or (rows // waiting[0].rows).bit_count() == 1


@given(sizes=QUEUES, most_rows=st.integers(1, 64))
def test_everybody_gets_back_what_is_made_of_their_own(sizes: list[tuple[int, int]], most_rows: int) -> None:
    """Group after group, each request is run once, and its part of the outputs comes of its inputs."""
    waiting = queue(sizes)
    while waiting:
        group = next_group(waiting, most_rows)
        waiting = [one for one in waiting if one not in group]
        inputs = joined_inputs([one.request for one in group], SIGNATURE)
        for one, part in zip(group, split_outputs(inputs, [one.rows for one in group]), strict=True):
            assert np.array_equal(part["x"], one.request.inputs["x"])
