"""Counts of a pool."""

from __future__ import annotations

from collections import Counter

import msgspec


class PoolStats(msgspec.Struct):
    """Counts of one pool since it was first asked.

    - `requests`: by route and status.
    - `answers`, `sequences`, `tokens`, `answer_s`: whole answers, what was in them, and how long they took, added up.
    - `parts`, `failures`, `retries`: parts that teachers answered, failed at, and that another was asked.
    - `hedges`, `hedges_won`: parts that a second teacher was asked, the first being slow; and that it answered first.
    """

    requests: Counter[tuple[str, int]] = msgspec.field(default_factory=Counter)
    answers: int = 0
    sequences: int = 0
    tokens: int = 0
    answer_s: float = 0.0
    parts: int = 0
    failures: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0

    def count_answer(self, tokens: int, sequences: int, took_s: float) -> None:
        self.answers += 1
        self.sequences += sequences
        self.tokens += tokens
        self.answer_s += took_s
