"""Which teachers of a pool have other weights."""

from __future__ import annotations

import msgspec
import pytest

from edl_runtime.gateway import self_test
from edl_runtime.gateway.self_test import difference, others_of, read_alike
from edl_runtime.gateway.teachers import TestScores
from edl_runtime.gateway.vllm import BadAnswerError
from edl_runtime.protocol.llm import LlmServer

A: TestScores = [(2, -1.0), (3, -2.0), (4, -3.0)]
NEAR_A: TestScores = [(2, -1.1), (3, -1.9), (4, -3.2)]
BEST = {str(70 + rank): {"logprob": -float(rank), "rank": rank} for rank in range(1, 5)}
B: TestScores = [(2, -2.0), (3, -1.0), (4, -3.0)]


@pytest.mark.parametrize("logprob", [-5e307, -3e38, -1e4])
def test_scores_that_no_model_has_fail_a_self_test(logprob: float) -> None:
    """Also where they are the same each time; a teacher that passes counts for what the pool's weights are."""
    server = LlmServer(kind="vllm", vocab_size=100)
    entries = [{ids: {"logprob": logprob, "rank": 9}} | BEST for ids in map(str, self_test.test_ids(server)[1:])]
    answer = msgspec.json.encode({"choices": [{"index": 0, "prompt_logprobs": [None, *entries]}]})
    with pytest.raises(BadAnswerError, match=r"which no model does|allowed is"):
        read_alike(server, [answer] * 3)
    assert read_alike(server, [answer.replace(msgspec.json.encode(logprob), b"-50.0")] * 3)[0][1] == -50.0


@pytest.mark.parametrize(
    ("tested", "others"),
    [
        ([], []),
        ([A], []),
        ([A, NEAR_A], []),
        ([A, B], [1]),
        ([B, A], [1]),
        ([B, A, NEAR_A], [0]),
        ([A, B, NEAR_A, B], [1, 3]),
    ],
)
def test_most_have_the_pool_s_weights(tested: list[TestScores], others: list[int]) -> None:
    """The oldest ones, where as many have others."""
    assert others_of(tested) == others


def test_teachers_with_other_limits_are_compared_where_they_were_asked_the_same() -> None:
    """A shorter one by its tokens alone, one of another vocabulary up to the first other token."""
    assert difference(A, NEAR_A[:1]) == pytest.approx(0.1)
    assert difference(A, [(2, -1.0), (9, -9.0)]) == 0.0
    assert difference(A, [(7, -9.0)]) == 0.0
