"""What is asked of a teacher about sequences of tokens, and the scores that it answers. No I/O.

A position's scores have the token that is really there first, whatever its rank, then the others by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from edl_runtime.gateway.errors import RequestRefusedError
from edl_runtime.protocol.llm import RAW_LOGPROBS, LlmServer

NO_SCALING = (0.0, 1.0)
"""Temperatures that scores are not divided by: with 0, only the generated token is meant, of which there is one."""

BYTES_PER_SCORE = 200
"""Most bytes of a score in JSON; 35 to 75 are usual."""
USUAL_BYTES = 60
MORE_BYTES = 1 << 20
LARGEST_VOCABULARY = 1_000_000
LONGEST = 1 << 20
"""Tokens of a choice, where no teacher tells its limit."""
MORE_OF_CHOICE = 4096
REPEATED = 4
"""Bytes of an answer for a byte of the question that it repeats, as text and as token numbers."""
MOST_TOKEN = 2**31 - 1
"""Token numbers are INT32 in several forms."""
MOST_ROWS = 1 << 16
"""Sequences of one request, and choices of its answer."""
ANSWER_LIMIT = 1 << 30
"""Most bytes of any answer of a teacher."""


TokenId = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKEN)]


class Score(NamedTuple):
    """A token's log-probability at a position, and its rank from 1."""

    token: int
    logprob: float
    rank: int


Positions = list[list[Score] | None]
"""Of a sequence; None is the first position, before which nothing is, and those that were not asked for."""


class Scoring(msgspec.Struct, frozen=True, kw_only=True):
    """How sequences are scored.

    - `k`: scores of each position besides the token that is there; -1 for all; None for no scores.
    - `max_tokens`: tokens to generate behind each sequence.
    """

    k: int | None = None
    temperature: float | None = None
    max_tokens: int = 1

    def check(self, server: LlmServer) -> None:
        """Raise RequestRefusedError for what the pool's teachers, with the limits of `server`, can't answer."""
        if self.k is None:
            return
        most = server.max_logprobs
        size = server.vocab_size or LARGEST_VOCABULARY
        if most < 0 and not -1 <= self.k <= size:
            raise RequestRefusedError(f"the number of logprobs is {self.k}, allowed are 0 to {size}, or -1 for all")
        if most >= 0 and not 0 <= self.k <= most:
            raise RequestRefusedError(
                f"the number of logprobs is {self.k}, allowed are 0 to {most} in this pool: start its teachers with "
                "a larger --max-logprobs, and `edl register` with the same"
            )
        if server.logprobs_mode == RAW_LOGPROBS and self.temperature not in (None, *NO_SCALING):
            raise RequestRefusedError(
                f"the temperature is {self.temperature}, but raw logprobs don't depend on it: set it to 1.0, or start "
                "the teachers and `edl register` with --logprobs-mode processed_logprobs"
            )

    def count(self, server: LlmServer) -> int | None:
        """Return how many of the best tokens each position has; None if only the teacher knows."""
        k = server.vocab_size if self.k == -1 else self.k
        return k if k is None or server.vocab_size is None else min(k, server.vocab_size)

    def expected(self, tokens: int, server: LlmServer) -> int:
        """Return about how many bytes an answer to so many tokens has; 0 without scores."""
        return 0 if self.k is None else tokens * ((self.count(server) or LARGEST_VOCABULARY) + 1) * USUAL_BYTES

    def answer_limit(self, tokens: int, server: LlmServer) -> int:
        """Return the most bytes that an answer to so many tokens may have."""
        k = (server.vocab_size or LARGEST_VOCABULARY) if self.k == -1 else self.k or 0
        return min(ANSWER_LIMIT, MORE_BYTES + (tokens + self.max_tokens) * (k + 2) * BYTES_PER_SCORE)


def choices_limit(choices: int, sent: int, longest: int, k: int | None) -> int:
    """Return the most bytes of an answer with so many choices, of up to `longest` tokens with `k` scores each.

    `sent`: bytes of the question, which each choice may repeat.
    """
    scores = min(k or 0, LARGEST_VOCABULARY) if (k or 0) >= 0 else LARGEST_VOCABULARY
    each = MORE_OF_CHOICE + REPEATED * sent + longest * (scores + 2) * BYTES_PER_SCORE
    return min(ANSWER_LIMIT, MORE_BYTES + choices * each)


def check_count(rows: int) -> None:
    """Raise RequestRefusedError unless a request has 1 to `MOST_ROWS` sequences, or choices."""
    if not rows:
        raise RequestRefusedError("it has no sequence")
    if rows > MOST_ROWS:
        raise RequestRefusedError(f"it asks for {rows:,} sequences, allowed are {MOST_ROWS:,}: send fewer at once")


def check_sequences(rows: Sequence[Sequence[int]], server: LlmServer, max_tokens: int) -> None:
    """Raise RequestRefusedError for a sequence that is empty or too long, or has numbers outside the vocabulary."""
    check_count(len(rows))
    for row, ids in enumerate(rows):
        if not ids:
            raise RequestRefusedError(f"sequence {row} is empty")
        longest = server.max_model_len
        if longest is not None and len(ids) + max_tokens > longest:
            more = f" and {max_tokens} to generate" if max_tokens else ""
            raise RequestRefusedError(f"sequence {row} has {len(ids)} tokens{more}, allowed are {longest} in all")
        most = MOST_TOKEN if server.vocab_size is None else server.vocab_size - 1
        if min(ids) < 0 or max(ids) > most:
            wrong = next(one for one in ids if not 0 <= one <= most)
            raise RequestRefusedError(f"sequence {row} has token {wrong}, allowed are 0 to {most}")


def top_k(scores: Sequence[Score], k: int) -> list[Score]:
    """Return the `k` scores of the lowest ranks, by rank."""
    return sorted(scores, key=lambda score: score.rank)[:k]
