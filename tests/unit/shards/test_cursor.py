"""The cursor's order, and what it refuses."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from edl_runtime.errors import DatasetChangedError, SpecError
from edl_runtime.shards.cursor import Cursor, check_length, micro_batches, order


def test_the_order_is_written_in_stone() -> None:
    """A checkpoint of another machine, numpy or year goes on in the same order."""
    assert order(7, 0, 10).tolist() == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]
    assert order(7, 1, 10).tolist() == [1, 3, 2, 7, 8, 4, 5, 9, 0, 6]
    assert order(8, 0, 10, shuffle=False).tolist() == list(range(10))


def test_a_million_samples_are_all_there() -> None:
    """Nothing is lost in a large dataset, and each epoch and seed has an order of its own."""
    orders = [order(seed, epoch, 1_000_000) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(np.array_equal(np.sort(one), np.arange(1_000_000)) for one in orders)
    assert not any(np.array_equal(orders[a], orders[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_nobody_can_change_the_order_by_its_result() -> None:
    """It is shared by all who ask."""
    with pytest.raises(ValueError, match="read-only"):
        order(0, 0, 10)[0] = 1


def test_a_dataset_of_another_length_is_refused() -> None:
    """Both lengths and the way out are said."""
    cursor = Cursor(length=10, global_batch=4)
    check_length(cursor, 10)
    with pytest.raises(DatasetChangedError, match=r"has 9 samples, and had 10 .* start anew") as caught:
        check_length(cursor, 9)
    assert (caught.value.before, caught.value.now) == (10, 9)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("length", 0),
        ("global_batch", 0),
        ("epochs", 0),
        ("seed", -1),
        ("epoch", -1),
        ("position", 10),
        ("position", -1),
    ],
)
def test_numbers_that_cannot_be_are_refused(field: str, wrong: int) -> None:
    """By name, in code and in a checkpoint."""
    fields = {"length": 10, "global_batch": 4, field: wrong}
    with pytest.raises(SpecError, match=field):
        Cursor(**fields)
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(fields, Cursor)


def test_a_micro_batch_has_a_sample_at_least() -> None:
    """None means the whole part."""
    assert [len(piece) for piece in micro_batches(order(0, 0, 5))] == [5]
    with pytest.raises(SpecError, match="micro_batch"):
        micro_batches(order(0, 0, 5), 0)
