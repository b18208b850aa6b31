"""Whether a teacher scores one sequence alike each time, which prefix caches have broken, and as its pool does.

No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from statistics import fmean

import msgspec

from edl_runtime.gateway.requests import PoolModel, Question, read_scores, scores_question
from edl_runtime.gateway.scoring import Positions, Scoring
from edl_runtime.gateway.teachers import TestScores
from edl_runtime.gateway.vllm import MOST_NEGATIVE, BadAnswerError
from edl_runtime.protocol.llm import LlmServer, served_models

TIMES = 3
TOKENS = 48
"""More than a block of vLLM's prefix cache has, which is 16."""
K = 4
TOLERANCE = 0.2
"""Sums of 16-bit numbers in another order differ by less, and so do replicas of one model on average."""


def check_serves(content: bytes, model: str) -> None:
    """Raise BadAnswerError unless a server's /v1/models has the model."""
    try:
        ids = [one.id for one in served_models(content)]
    except msgspec.DecodeError as error:
        raise BadAnswerError(f"its /v1/models is invalid: {error}") from None
    if model not in ids:
        raise BadAnswerError(f"it serves {', '.join(map(repr, ids[:20])) or 'no model'}, not {model!r}")


def test_ids(server: LlmServer) -> list[int]:
    """Return a sequence that any server of these limits can score."""
    most = min(TOKENS, (server.max_model_len or TOKENS) - 1)
    return [place % ((server.vocab_size or TOKENS) - 1) + 1 for place in range(max(1, most))]


def test_question(model: str, server: LlmServer) -> Question:
    """Return what is asked `TIMES` times."""
    return scores_question(server.kind, PoolModel(model, server), [test_ids(server)], _scoring(server))


def _scoring(server: LlmServer) -> Scoring:
    return Scoring(k=K if server.max_logprobs < 0 else min(K, server.max_logprobs), temperature=1.0)


def read_alike(server: LlmServer, answers: Sequence[bytes]) -> TestScores:
    """Return the scores that all answers have. Raises BadAnswerError unless they are the same."""
    first, *others = [_positions(server, content) for content in answers]
    least = min((position[0].logprob for position in first if position), default=0.0)
    if least < MOST_NEGATIVE:
        raise BadAnswerError(f"it scores a token with {least:g}, which no model does")
    for other in others:
        for place, (one, two) in enumerate(zip(first, other, strict=True)):
            if one and two and abs(one[0].logprob - two[0].logprob) > TOLERANCE:
                scores = f"{one[0].logprob:.3f}, then {two[0].logprob:.3f}"
                raise BadAnswerError(f"it scores one sequence differently each time: token {place} {scores}")
    reals = zip(*([position[0] for position in one if position] for one in (first, *others)), strict=True)
    return [(real[0].token, fmean(score.logprob for score in real)) for real in reals]


def difference(one: TestScores, other: TestScores) -> float:
    """Return how far two teachers' scores are apart on average, about the tokens that both were asked."""
    same = list(takewhile(lambda both: both[0][0] == both[1][0], zip(one, other, strict=False)))
    return fmean(abs(a - b) for (_, a), (_, b) in same) if same else 0.0


def others_of(tested: Sequence[TestScores]) -> list[int]:
    """Return which teachers, given from the oldest on, have other weights than their pool: than most of it.

    Where as many agree with one as with another, the older one's weights are the pool's.
    """
    agreeing = [[difference(one, other) <= TOLERANCE for other in tested] for one in tested]
    ours = max(agreeing, key=sum, default=[])
    return [place for place, agrees in enumerate(ours) if not agrees]


def _positions(server: LlmServer, content: bytes) -> Positions:
    _, (positions,) = read_scores(server.kind, content, [test_ids(server)], _scoring(server), server)
    return positions
