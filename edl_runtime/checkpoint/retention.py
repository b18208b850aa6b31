"""Which checkpoints may go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby

from edl_runtime.checkpoint.manifest import Position


def kept_for_good(positions: Iterable[Position], every_steps: int | None) -> set[Position]:
    """Return the first at or after each multiple of `every_steps`, of those that training has not gone back behind.

    It has where a later generation has a checkpoint of the same step or an earlier one.
    """
    first: dict[int, Position] = {}
    if every_steps is not None:
        for position in sorted(_not_gone_back_behind(positions)):
            if position.step >= every_steps:
                first.setdefault(position.step // every_steps, position)
    return set(first.values())


def _not_gone_back_behind(positions: Iterable[Position]) -> Iterator[Position]:
    later = math.inf  # the earliest step of all later generations
    for _, generation in groupby(sorted(positions, reverse=True), key=lambda each: each.generation):
        steps = list(generation)
        yield from (position for position in steps if position.step < later)
        later = min(later, steps[-1].step)
