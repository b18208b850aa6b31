"""Which items of a source teachers are asked about together."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from edl_runtime.distill import batching
from edl_runtime.distill.batching import ACCUMULATE_S, ItemAccumulator


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the sources here count as quick."""
    monkeypatch.setattr(batching, "ACCUMULATE_S", 60.0)


def pieces(items: Iterable[Any], least: int, most: int) -> list[int]:
    given: list[list[Any]] = []

    def give(piece: list[Any]) -> bool:
        given.append(piece)
        return True

    gathers = ItemAccumulator(least, lambda: most, give)
    items = list(items)
    assert all(map(gathers.add, items))
    assert gathers.finish()
    assert [item for piece in given for item in piece] == items
    return [len(piece) for piece in given]


@pytest.mark.parametrize(
    ("items", "least", "most", "sizes"),
    [
        (30, 1, 400, [16, 8, 4, 2]),
        (30, 1, 10, [8, 8, 8, 4, 2]),
        (3, 1, 1, [1, 1, 1]),
        (300, 64, 400, [256, 44]),
        (100, 64, 64, [64, 36]),
        (10, 4, 4, [4, 4, 2]),
        (0, 1, 8, []),
    ],
)
def test_few_batch_sizes_occur(items: int, least: int, most: int, sizes: list[int]) -> None:
    """Pieces have the least times a power of two, since a new size costs a teacher several runs."""
    assert pieces(range(items), least, most) == sizes


def test_items_of_a_slow_source_are_requested_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No item waits for another; the least is always waited for."""
    monkeypatch.setattr(batching, "ACCUMULATE_S", ACCUMULATE_S)
    wait = threading.Event()

    def slow() -> Iterable[int]:
        for number in range(6):
            wait.wait(1.1 * ACCUMULATE_S)
            yield number

    given: list[list[int]] = []
    gathers = ItemAccumulator(2, lambda: 8, lambda piece: given.append(piece) is None)
    assert all(map(gathers.add, slow()))
    assert given == [[0, 1], [2, 3], [4, 5]]


def test_what_is_held_back_goes_when_the_script_waits() -> None:
    """But no less than the least."""
    given: list[list[int]] = []
    gathers = ItemAccumulator(2, lambda: 8, lambda piece: given.append(piece) is None)
    assert gathers.is_holding_back
    for number in range(5):
        gathers.add(number)
    assert given == []
    gathers.flush()
    gathers.flush()
    assert given == [[0, 1, 2, 3]]
    assert gathers.finish()
    assert given[1:] == [[4]]
    assert not ItemAccumulator(2, lambda: 3, lambda _: True).is_holding_back


def test_nothing_is_emitted_after_the_epoch_is_over() -> None:
    """When the script has left the epoch, the source is told."""
    given: list[list[int]] = []
    gathers = ItemAccumulator(1, lambda: 4, lambda piece: given.append(piece) is not None)
    assert [gathers.add(number) for number in range(4)] == [True, True, True, False]
    assert given == [[0, 1, 2, 3]]


def test_what_came_before_an_error_is_given_before_it() -> None:
    """A source that raises in the middle of a piece loses nothing; of a piece that is refused nothing more is given."""

    def source() -> Iterable[int]:
        yield from range(6)
        raise OSError("no more")

    given: list[list[int]] = []
    with pytest.raises(OSError, match="no more"):
        ItemAccumulator(4, lambda: 4, lambda piece: given.append(piece) is None).consume(source())
    assert given == [[0, 1, 2, 3], [4, 5]]

    def refuse(piece: list[int]) -> bool:
        given.append(piece)
        raise ValueError("wrong")

    given.clear()
    with pytest.raises(ValueError, match="wrong"):
        ItemAccumulator(1, lambda: 4, refuse).consume(range(6))
    assert given == [[0, 1, 2, 3]]
