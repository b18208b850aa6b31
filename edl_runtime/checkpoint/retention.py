"""Which checkpoints may go."""

from __future__ import annotations

from collections.abc import Iterable

from edl_runtime.checkpoint.manifest import Position


def kept_for_good(positions: Iterable[Position], every_steps: int | None) -> set[Position]:
    """Return the first at or after each multiple of `every_steps`: of one step, that of the latest generation."""
    first: dict[int, Position] = {}
    if every_steps is not None:
        for position in sorted(positions, key=lambda each: (each.step, -each.generation)):
            if position.step >= every_steps:
                first.setdefault(position.step // every_steps, position)
    return set(first.values())
