"""How far each rank is, as whole numbers that ride in an all-reduce that sums: two places a rank, zeros elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Position(msgspec.Struct, frozen=True):
    """The shard that a rank is at, and how many of its records are applied after the step."""

    ticket: int
    offset: int


def to_vector(position: Position | None, rank: int, world_size: int) -> list[int]:
    """Return this rank's share of the sum. None: it has not begun a shard."""
    vector = [0] * (2 * world_size)
    if position is not None:
        vector[2 * rank : 2 * rank + 2] = [position.ticket + 1, position.offset]
    return vector


def from_vector(vector: Sequence[int]) -> dict[int, int]:
    """Return of the sum over all ranks how much of each ticket is applied, as `commit` and `release` take it."""
    applied: dict[int, int] = {}
    for marked, offset in zip(vector[::2], vector[1::2], strict=True):
        if marked:
            applied[marked - 1] = max(offset, applied.get(marked - 1, 0))
    return applied


def is_shared(vector: Sequence[int]) -> bool:
    """Return of the sum over all ranks whether two are at one shard: then one of them has it without a lease."""
    marks = [mark for mark in vector[::2] if mark]
    return len(set(marks)) < len(marks)
