"""vLLM's and SGLang's forms of scores, and what is made of one for the other."""

from __future__ import annotations

import base64
import contextlib
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from edl_runtime.gateway import sglang, vllm
from edl_runtime.gateway.errors import RequestRefusedError
from edl_runtime.gateway.scoring import ANSWER_LIMIT, Positions, Score, Scoring, check_sequences, choices_limit, top_k
from edl_runtime.gateway.vllm import BadAnswerError, Raw
from edl_runtime.protocol.llm import LlmServer

K = 3

KEYS = b"".join(b',"%d":1' % at for at in range(100_000)) + b"}"
SCORES = b",".join(b'"%d":{"logprob":-1.0,"rank":1}' % at for at in range(20_000))

SIX_OF_TWO = {"7": {"logprob": -1.0, "rank": 1}, "6": {"logprob": -2.0, "rank": 2}}
"""Right scores of token 6 with the best two."""


@st.composite
def scored(draw: st.DrawFn) -> tuple[list[int], Positions]:
    """Return a sequence, and scores of it: the token that is there has some rank, the others are the best K."""
    ids = draw(st.lists(st.integers(0, 50), min_size=1, max_size=8))
    positions: Positions = [None]
    for token in ids[1:]:
        best = draw(st.lists(st.integers(0, 50), min_size=K, max_size=K, unique=True))
        values = sorted(draw(st.lists(st.floats(-20, 0), min_size=K + 1, max_size=K + 1)), reverse=True)
        scores = [Score(one, value, rank) for rank, (one, value) in enumerate(zip(best, values, strict=False), 1)]
        if token not in best:
            scores.append(Score(token, values[K], K + 1))
        positions.append(vllm.real_first(scores, token))
    return ids, positions


@given(scored())
def test_scores_survive_both_forms(given_scores: tuple[list[int], Positions]) -> None:
    """Written and read again, by either form, they are the same."""
    ids, positions = given_scores
    choice, item = vllm.choice(positions), sglang.item(positions, ids, K)
    vllm.check_scores(choice, ids, K)
    for flat in ("", "flat", "b64"):
        sglang.check_scores(sglang.item(positions, ids, K, flat), ids, K)
    assert vllm.positions_of(choice, ids, K) == positions
    assert sglang.positions_of(item, ids, K) == positions


@given(scored())
def test_what_trl_reads_of_both_forms_is_the_same(given_scores: tuple[list[int], Positions]) -> None:
    """The best K by rank, whichever teacher answered."""
    ids, positions = given_scores
    translated = vllm.positions_of(vllm.choice(sglang.positions_of(sglang.item(positions, ids, K), ids, K)), ids, K)
    for one, two in zip(positions, translated, strict=True):
        assert (one and top_k(one, K)) == (two and top_k(two, K))


@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    """Nothing but BadAnswerError comes out of a teacher's answer."""
    for read in (lambda: vllm.read_choices(content, 1), lambda: sglang.read_items(content, 1)):
        with contextlib.suppress(BadAnswerError):
            read()


@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda some: st.lists(some, max_size=3)))
def test_scores_of_any_shape_are_read_or_refused(value: object) -> None:
    """Also where JSON is right, and its content is not."""
    ids = [5, 6]
    for holder in ({"prompt_logprobs": value}, {"prompt_logprobs": [None, {"6": value}]}):
        with contextlib.suppress(BadAnswerError):
            vllm.positions_of(Raw(msgspec.json.encode(holder)), ids, None)
    for meta in ({"input_token_logprobs": value}, {"input_token_logprobs": [[None, 5, None], value]}):
        with contextlib.suppress(BadAnswerError):
            sglang.positions_of(Raw(msgspec.json.encode({"meta_info": meta})), ids, 1)


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([None], "no list of 2 positions"),
        ([None, {"7": {"logprob": -1.0, "rank": 1}}], "without its token 6"),
        ([None, None], "without its token 6"),
        ([None, {"6": {"logprob": None, "rank": 1}}], "null"),
        ([None, {"6": {"logprob": -1.0, "rank": 1}}], "1 scores, and 2 were"),
        ([None, SIX_OF_TWO | {"8": {"logprob": -3.0, "rank": 3}, "9": {"logprob": -4.0, "rank": 4}}], "4 scores"),
        ([None, SIX_OF_TWO | {"7": {"logprob": "-1.0", "rank": 1}}], "position 1 are invalid"),
        ([None, SIX_OF_TWO | {"7": {"logprob": 0.5, "rank": 1}}], "0.5000, allowed is 0 or less"),
        ([None, SIX_OF_TWO | {"6": {"logprob": -5e307, "rank": 2}}], r"-5e\+307, allowed is -3.4"),
        ([None, SIX_OF_TWO | {"7": {"logprob": -2.5, "rank": 1}}], "grow with their rank"),
        ([None, SIX_OF_TWO | {"7": {"logprob": -1.0, "rank": 0}}], "position 1 are invalid"),
        (None, "no list"),
        ("all", "no list"),
    ],
)
def test_wrong_scores_are_found(scores: object, said: str) -> None:
    """With what is wrong of them."""
    with pytest.raises(BadAnswerError, match=said):
        vllm.check_scores(Raw(msgspec.json.encode({"prompt_logprobs": scores})), [5, 6], 2)


MANY = 300_000


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (lambda content: vllm.read_choices(content, 2), b'{"choices":[1' + b",1" * MANY + b"]}"),
        (lambda content: vllm.read_choices(content, 2), b'{"choices":[{}' + b",{}" * MANY + b"]}"),
        (lambda content: vllm.read_choices(content, 0), b'{"choices":[]' + KEYS),
        (lambda content: vllm.read_choices(content, 1), b'{"choices":[{"a":1' + KEYS + b"]}"),
        (lambda content: vllm.check_scores(Raw(content), [5, 6], 2), b'{"prompt_logprobs":[1' + b",1" * MANY + b"]}"),
        (lambda content: vllm.check_scores(Raw(content), [5, 6], 2), b'{"prompt_logprobs":[null,{' + SCORES + b"}]}"),
        (lambda content: sglang.read_items(content, 1), b"[1" + b",1" * MANY + b"]"),
        (vllm.check_text, b"a" * 3_000_000 + "\U0001f600".encode() + b"\xff"),
    ],
)
def test_an_answer_that_is_none_to_its_question_takes_no_memory(
    read: Callable[[bytes], object], content: bytes
) -> None:
    """Values that were not asked for are refused before they are Python's objects, which take up to a hundred times."""
    tracemalloc.start()
    try:
        with pytest.raises(BadAnswerError):
            read(content)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2 * len(content)


def test_the_scores_beside_choices_may_be_many() -> None:
    """As vLLM answers about tokens, with `prompt_logprobs` of the whole answer."""
    content = b'{"choices":[{"index":0}],"prompt_logprobs":[null,{' + SCORES + b"}]}"
    vllm.read_choices(content, 1)
    vllm.check_scores(Raw(content), [5, 6], 20_000)


def test_a_chat_s_answer_is_no_dict() -> None:
    """It is handed on as it came, so that its fields are only looked at."""
    content = b'{"a":1' + KEYS
    tracemalloc.start()
    try:
        vllm.check_object(content)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < len(content)
    with pytest.raises(BadAnswerError, match="no JSON object"):
        vllm.check_object(b"[]")


def test_the_most_bytes_of_choices_follow_from_what_was_asked() -> None:
    """A short question has a short answer, of whichever teacher; none has more than any may."""
    assert choices_limit(1, 40, 1, None) < 1.1 * 2**20
    assert choices_limit(8, 1000, 4096, None) < choices_limit(8, 1000, 4096, 20) < ANSWER_LIMIT
    assert choices_limit(8, 1000, 10**4000, -1) == ANSWER_LIMIT


def test_infinite_scores_are_found() -> None:
    """Whichever way they are written."""
    for infinite in (b"-Infinity", b"-1e999"):
        with pytest.raises(BadAnswerError, match=r"malformed|out of range"):
            vllm.check_scores(Raw(b'{"prompt_logprobs":[null,{"6":{"logprob":%b,"rank":1}}]}' % infinite), [5, 6], 1)


@pytest.mark.parametrize(
    ("tops", "said"),
    [
        ([], "0 of 2 best tokens"),
        ([[-1.0, 7, None]], "1 of 2 best tokens"),
        ([[-1.0, 7, None], [-1.5, 8, None], [-1.7, 9, None]], "3 of 2 best tokens"),
        ([[-1.0, 7, None], ["-1.5", 8, None]], "invalid"),
        ([[0.5, 7, None], [-1.5, 8, None]], "0.5000, allowed"),
        ([[-1.5, 7, None], [-1.0, 8, None]], "grow with their rank"),
        ([[-1.5, 7, None], [-1.7e308, 8, None]], r"-1.7e\+308, allowed is -3.4"),
        ([[-2.5, 7, None], [-3.0, 8, None]], "grow with their rank"),
    ],
)
def test_wrong_best_tokens_of_sglang_are_found(tops: list[list[Any]], said: str) -> None:
    """Where its own form is handed on, and where another one is made of it; the token that is there has -2."""
    about = {"input_token_logprobs": [[None, 5, None], [-2.0, 6, None]], "input_top_logprobs": [None, tops]}
    item = Raw(msgspec.json.encode({"meta_info": about}))
    for read in (sglang.check_scores, sglang.positions_of):
        with pytest.raises(BadAnswerError, match=said):
            read(item, [5, 6], 2)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[-1.0]], "1 positions"),
        ([[-1.0, -2.0], [-1.0, -2.0]], "2 positions"),
        ([[0.5, -2.0]], "0.5000, allowed"),
        ([[-2.0, -1.0]], "grow with their rank"),
        ([[math.nan, -1.0]], "not a number"),
    ],
)
def test_wrong_best_tokens_of_sglang_s_shorter_forms_are_found(values: list[list[float]], said: str) -> None:
    """As lists of numbers, and in base 64, which also has NaN."""
    tokens = {"input_token_logprobs": [[None, 5, None], [-3.0, 6, None]], "input_top_logprobs_null_prefix": 1}
    shape = {"input_top_logprobs_shape": np.shape(values)}
    flat = {"input_top_logprobs_val_flat": np.ravel(values).tolist()}
    b64 = {"input_top_logprobs_val_flat_b64": base64.b64encode(np.array(values, np.float32).tobytes()).decode()}
    for form in (b64,) if said == "not a number" else (flat, b64):
        with pytest.raises(BadAnswerError, match=said):
            sglang.check_scores(Raw(msgspec.json.encode({"meta_info": tokens | shape | form})), [5, 6], 2)


def test_the_least_score_is_that_of_a_masked_token() -> None:
    """In float32, as servers mask; minus infinity is told in base 64 alone."""
    least = float(np.finfo(np.float32).min)
    vllm.check_falling([-1.0, least, least], 1)
    meta = {"input_token_logprobs": [[None, 5, None], [-3.0, 6, None]], "input_top_logprobs_null_prefix": 1}
    values = base64.b64encode(np.array([-1.0, -np.inf], np.float32).tobytes()).decode()
    meta |= {"input_top_logprobs_val_flat_b64": values, "input_top_logprobs_shape": [1, 2]}
    sglang.check_scores(Raw(msgspec.json.encode({"meta_info": meta})), [5, 6], 2)


def test_numbers_that_no_token_has_are_found() -> None:
    """Else they would not fit into the arrays of other forms."""
    huge = Raw(b'{"prompt_logprobs":[null,{"6":{"logprob":-1.0,"rank":1},"%d":{"logprob":-2.0,"rank":2}}]}' % 10**30)
    with pytest.raises(BadAnswerError, match="position 1"):
        vllm.positions_of(huge, [5, 6], 1)
    with pytest.raises(BadAnswerError):
        vllm.read_choices(b'{"choices":[3]}', 1)


def test_sglang_need_not_score_the_prompt() -> None:
    """By its default for logprob_start_len it scores none of it."""
    sglang.check_scores(Raw(b'{"meta_info":{"input_token_logprobs":[]}}'), [5, 6], 0)


def test_the_token_that_is_there_may_stand_anywhere() -> None:
    """It is looked for where it does not come first, as vLLM has it."""
    entries = {"7": {"logprob": -1.0, "rank": 1}, "6": {"logprob": -2.0, "rank": 2}}
    vllm.check_scores(Raw(msgspec.json.encode({"prompt_logprobs": [None, entries]})), [5, 6], 2)


def test_choices_are_numbered_anew_and_usage_is_added() -> None:
    """The choices' other bytes are as they came, also what this process knows nothing of."""
    part = b'{"id":"a","choices":[{"index":0,"text":"x","new":[1.50]}],"usage":{"prompt_tokens":3,"total_tokens":4}}'
    joined = vllm.join([vllm.read_choices(part, 1), vllm.read_choices(part, 1)])
    assert b'"choices":[{"index":0,"text":"x","new":[1.50]},{"index":1,"text":"x","new":[1.50]}]' in joined
    assert msgspec.json.decode(joined)["usage"] == {"prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 8}


@pytest.mark.parametrize(
    ("scoring", "server", "said"),
    [
        (Scoring(k=21), {}, "0 to 20"),
        (Scoring(k=-2), {"max_logprobs": -1}, "-2"),
        (Scoring(k=5, temperature=0.5), {}, "processed_logprobs"),
    ],
)
def test_what_can_t_be_scored_is_refused(scoring: Scoring, server: dict[str, int], said: str) -> None:
    """By the pool's limits."""
    with pytest.raises(RequestRefusedError, match=said):
        scoring.check(LlmServer(kind="vllm", **server))  # type: ignore[arg-type]


def test_what_can_be_scored_is_not_refused() -> None:
    """Any temperature without scores, or with processed ones; 0 and 1 with raw ones; all tokens without a limit."""
    raw = LlmServer(kind="vllm")
    for scoring in (Scoring(temperature=0.7), Scoring(k=5, temperature=0.0), Scoring(k=20, temperature=1.0)):
        scoring.check(raw)
    Scoring(k=5, temperature=0.7).check(LlmServer(kind="vllm", logprobs_mode="processed_logprobs"))
    Scoring(k=-1).check(LlmServer(kind="vllm", max_logprobs=-1))


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    """With their place."""
    server = LlmServer(kind="vllm", vocab_size=10, max_model_len=4)
    check_sequences([[0, 9]], server, 1)
    for rows, said in (([[1], [3, 10]], "sequence 1 has token 10, allowed are 0 to 9"), ([[1] * 4], "4 in all")):
        with pytest.raises(RequestRefusedError, match=said):
            check_sequences(rows, server, 1)
