"""How a request is split into parts, which teachers answer at the same time."""

from __future__ import annotations

from collections.abc import Sequence

PARTS_PER_TEACHER = 2
"""So that a faster teacher gets more of them, and a lost one costs less."""
MIN_TOKENS = 2_048
"""Smaller parts cost a teacher more than they spread."""
MAX_TOKENS = 16_384
MAX_ROWS = 1_024
"""vLLM's VLLM_MAX_COMPLETION_PROMPTS."""


def split(tokens: Sequence[int], teachers: int) -> list[range]:
    """Return the rows of each part, in order: about as many tokens in each, as sequences differ a hundredfold.

    `tokens` are those of each row. A row is never split. There are `PARTS_PER_TEACHER` parts for each of `teachers`,
    unless that makes them smaller than `MIN_TOKENS` or larger than `MAX_TOKENS`.
    """
    aim = -(-sum(tokens) // (PARTS_PER_TEACHER * max(1, teachers)))
    aim = min(max(aim, MIN_TOKENS), MAX_TOKENS)
    parts: list[range] = []
    start = size = 0
    for row, more in enumerate(tokens):
        if row > start and (size + more > aim or row - start == MAX_ROWS):
            parts.append(range(start, row))
            start, size = row, 0
        size += more
    return [*parts, range(start, len(tokens))] if tokens else []
