"""The cursor, for any dataset and any sequence of group sizes."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.shards import cursor as shards
from edl_runtime.shards.cursor import Cursor

CURSORS = st.builds(
    Cursor,
    length=st.integers(1, 60),
    global_batch=st.integers(1, 25),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(start=CURSORS, sizes=SIZES, micro=st.none() | st.integers(1, 7))
def test_every_sample_counts_once_an_epoch(start: Cursor, sizes: list[int], micro: int | None) -> None:
    """However many ranks each step has, all of them together take each sample once, and all steps were foretold."""
    cursor, steps = start, 0
    applied: list[list[int]] = [[] for _ in range(start.epochs)]
    for world_size in itertools.cycle(sizes):
        if cursor.done:
            break
        indices = shards.batch(cursor)
        for rank in range(world_size):
            for piece in shards.micro_batches(shards.part(indices, rank, world_size), micro):
                assert 0 < len(piece) <= (micro or start.global_batch)
                applied[cursor.epoch] += piece.tolist()
        cursor, steps = shards.advance(cursor, len(indices)), steps + 1
    assert all(sorted(epoch) == list(range(start.length)) for epoch in applied)
    assert steps == shards.total_steps(start) == start.epochs * shards.steps_per_epoch(start)
    assert not len(shards.batch(cursor))


@given(start=CURSORS, sizes=SIZES)
def test_the_size_of_the_group_changes_nothing_in_a_batch(start: Cursor, sizes: list[int]) -> None:
    """The parts in the order of their ranks are the batch, and they differ by one sample at most."""
    indices = shards.batch(start)
    for world_size in sizes:
        parts = [shards.part(indices, rank, world_size) for rank in range(world_size)]
        assert np.array_equal(np.concatenate(parts), indices)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(start=CURSORS, steps=st.integers(0, 40))
def test_a_checkpoint_goes_on_where_it_was(start: Cursor, steps: int) -> None:
    """A cursor that went through JSON gives the same batches as one that did not."""
    cursor = start
    for _ in range(min(steps, shards.total_steps(start))):
        cursor = shards.advance(cursor, len(shards.batch(cursor)))
    again = msgspec.json.decode(msgspec.json.encode(cursor), type=Cursor)
    assert again == cursor
    assert np.array_equal(shards.batch(again), shards.batch(cursor))


@given(start=CURSORS, wrong=st.integers(-3, 100))
def test_only_what_an_epoch_has_left_can_be_taken(start: Cursor, wrong: int) -> None:
    """A cursor never leaves its epoch but by its end."""
    if 0 < wrong <= start.length:
        assert shards.advance(start, wrong).position == wrong % start.length
    else:
        with pytest.raises(ValueError, match="can't be taken"):
            shards.advance(start, wrong)
