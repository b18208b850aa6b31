"""The cursor, for any dataset and any sequence of group sizes, its order, and what it refuses."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.elastic.data.indexed import DatasetCursor, check_length, count_steps, micro_batches, part
from edl_runtime.shards.errors import DatasetChangedError
from edl_runtime.shards.ledger import order

CURSORS = st.builds(
    DatasetCursor,
    length=st.integers(1, 60),
    global_batch=st.integers(1, 25),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(start=CURSORS, sizes=SIZES, micro=st.none() | st.integers(1, 7))
def test_every_sample_counts_once_an_epoch(start: DatasetCursor, sizes: list[int], micro: int | None) -> None:
    """However many ranks each step has, together they take each sample once, in `total_steps` steps."""
    cursor, steps = start, 0
    applied: list[list[int]] = [[] for _ in range(start.epochs)]
    for world_size in itertools.cycle(sizes):
        if cursor.done:
            break
        indices = cursor.batch()
        for rank in range(world_size):
            for piece in micro_batches(part(indices, rank, world_size), micro):
                assert 0 < len(piece) <= (micro or start.global_batch)
                applied[cursor.epoch] += piece.tolist()
        cursor, steps = cursor.advance(len(indices)), steps + 1
    assert all(sorted(epoch) == list(range(start.length)) for epoch in applied)
    assert steps == start.total_steps
    assert not len(cursor.batch())


@given(start=CURSORS, sizes=SIZES)
def test_the_size_of_the_group_changes_nothing_in_a_batch(start: DatasetCursor, sizes: list[int]) -> None:
    """The parts in the order of ranks are the batch; their sizes differ by one sample at most."""
    indices = start.batch()
    for world_size in sizes:
        parts = [part(indices, rank, world_size) for rank in range(world_size)]
        assert np.array_equal(np.concatenate(parts), indices)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(start=CURSORS, sizes=SIZES, grows=st.booleans())
def test_a_schedule_by_samples_is_that_of_one_instance(start: DatasetCursor, sizes: list[int], *, grows: bool) -> None:
    """It makes all its steps, none before its samples; one a step where the batch does not grow, or one trains."""
    batch, cursor = start.global_batch, start
    for world_size in itertools.cycle(sizes):
        if cursor.done:
            break
        cursor = msgspec.structs.replace(cursor, global_batch=batch * world_size if grows else batch)
        after = cursor.advance(len(cursor.batch()))
        moved = after.steps_of_one(batch) - cursor.steps_of_one(batch)
        assert 1 <= moved <= (world_size if grows else 1)
        cursor = after
    assert cursor.steps_of_one(batch) == count_steps(start.length, batch, start.epochs)


@given(start=CURSORS, wrong=st.integers(-3, 100))
def test_only_what_an_epoch_has_left_can_be_taken(start: DatasetCursor, wrong: int) -> None:
    """A cursor leaves its epoch only at its end."""
    if 0 < wrong <= start.length:
        assert start.advance(wrong).position == wrong % start.length
    else:
        with pytest.raises(ValueError, match="can't be taken"):
            start.advance(wrong)


def test_the_order_never_changes() -> None:
    """A checkpoint continues in the same order on any machine, with any numpy."""
    assert order(7, 0, 10).tolist() == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]
    assert order(7, 1, 10).tolist() == [1, 3, 2, 7, 8, 4, 5, 9, 0, 6]
    assert order(8, 0, 10).tolist() == [8, 2, 0, 7, 5, 6, 9, 3, 4, 1]
    assert order(8, 0, 10, shuffle=False).tolist() == list(range(10))


def test_the_order_is_read_only() -> None:
    """All callers share it."""
    with pytest.raises(ValueError, match="read-only"):
        order(0, 0, 10)[0] = 1


def test_a_dataset_of_another_length_is_refused() -> None:
    """The error has both lengths and says what to do."""
    check_length(10, 10)
    with pytest.raises(DatasetChangedError, match=r"has 9 samples, and had 10 .* to start from scratch") as caught:
        check_length(10, 9)
    assert (caught.value.before, caught.value.now) == (10, 9)


def test_a_part_is_one_micro_batch_without_a_size() -> None:
    """None means the whole part."""
    assert [len(piece) for piece in micro_batches(order(0, 0, 5))] == [5]
