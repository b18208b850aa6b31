"""Trainers' requests: which teachers can answer them, and what these are asked."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from edl_runtime.gateway.errors import RequestRefusedError
from edl_runtime.gateway.requests import (
    BodyMeter,
    Completions,
    Generate,
    PoolModel,
    Request,
    SequenceLogprobs,
    TokensInOut,
)
from edl_runtime.gateway.scoring import MOST_ROWS
from edl_runtime.protocol.llm import LlmServer

MODEL = PoolModel("net", LlmServer(kind="vllm", max_logprobs=-1, logprobs_mode="processed_logprobs"))
TRL = {"prompt": [[1, 2], [3]], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 3}
SLIME = {
    "input_ids": [[1, 2], [3]],
    "sampling_params": {"max_new_tokens": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 3,
}


HUGE = "huge"
"""Stands for a number of 4,300 digits, the most that Python reads."""

N = 50_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[[' + b"12345," * N + b"1]]}",
        b'{"prompt":[' + b"[1]," * N + b"[1]]}",
        b'{"prompt":["a","' + b'a","' * N + b'"]}',
        b'{"input_ids":[1],"return_logprob":[' + b"[]," * N + b"1]}",
        b'{"input_ids":[1],"return_logprob":[' + b"{}," * N + b"1]}",
        b'{"input_ids":[1],"return_logprob":[' + b'{"a":1.5},' * N + b"1]}",
        b'{"input_ids":[1],"return_logprob":{' + b",".join(b'"%d":1.5' % at for at in range(N)) + b"}}",
        b'{"input_ids":[1],"x":{' + b",".join(b'"%d":1' % at for at in range(N)) + b"}}",
        b"{" + b",".join(b'"%d":1' % at for at in range(N)) + b',"input_ids":[1]}',
        b'{"prompt":"' + b"a" * 40 * N + "\U0001f600".encode() + b'"}',
        b'{"prompt":"' + b"a" * 40 * N + rb'\ud83d\ude00"}',
        b'{"input_ids":[[' + b"9999999," * N + b'1]],"text":"' + b"x" * N + b'"}',
    ],
)
def test_a_body_takes_no_more_memory_than_is_reckoned(body: bytes) -> None:
    """Whatever its values are: what they take as Python's objects is bounded before they are made."""
    form = Completions if b'"prompt"' in body else Generate
    tracemalloc.start()
    try:
        read = form(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read.tokens
    assert most < BodyMeter().add(body) - len(body)


PADDED = {"sequences": [[1] * 4000, *[[1]] * 60_000], "prompt_lengths": [0] * 60_001, "top_logprobs": 1}


def test_a_text_is_as_wide_as_its_widest_character() -> None:
    """Whichever piece of a body has that, or has a part of how it is written."""
    body = b'{"prompt":"' + b"a" * 1000 + rb'\ud83d\ude00"}'
    meter = BodyMeter()
    taken = sum(meter.add(body[at : at + 1]) for at in range(len(body)))
    assert taken == BodyMeter().add(body) > 8 * len(body)
    assert BodyMeter().add(body[:1000]) < 4 * 1000


def test_a_binary_answer_that_padding_makes_huge_is_refused() -> None:
    """All rows are as long as the longest one: 359 KB of request took 3.2 GB. As JSON they have their own lengths."""
    model = PoolModel("net", LlmServer(kind="vllm", max_logprobs=20, logprobs_mode="processed_logprobs"))
    SequenceLogprobs(msgspec.json.encode(PADDED)).check(model)
    with pytest.raises(RequestRefusedError, match=r"as binary takes 3,662 MiB, as all of its 60,001 rows.* are 256"):
        SequenceLogprobs(msgspec.json.encode(PADDED | {"response_format": "binary"})).check(model)


def asked(request: Request, kind: Any, rows: range = range(1, 2)) -> Any:
    """Return the JSON that a teacher is asked."""
    request.check(MODEL)
    return msgspec.json.decode(request.question(kind, rows).body)


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({}, {"vllm", "sglang"}),
        ({"max_tokens": 2}, {"vllm"}),
        ({"prompt_logprobs": -1}, {"vllm"}),
        ({"n": 2}, {"vllm"}),
        ({"echo": True}, {"vllm"}),
        ({"prompt": "text"}, {"vllm"}),
        ({"prompt_logprobs": None}, {"vllm", "sglang", "swift"}),
    ],
)
def test_only_pure_scores_are_translated(more: dict[str, Any], kinds: set[str]) -> None:
    """SGLang's servers can't answer the rest in vLLM's form."""
    assert Completions(msgspec.json.encode(TRL | more)).kinds == kinds


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({}, {"vllm", "sglang"}),
        ({"logprob_start_len": 1}, {"sglang"}),
        ({"token_ids_logprob": [4]}, {"sglang"}),
        ({"image_data": ["x", None]}, {"sglang"}),
        ({"image_data": None}, {"vllm", "sglang"}),
        ({"top_logprobs_num": [1, 2]}, {"sglang"}),
        ({"return_text_in_logprobs": True}, {"sglang"}),
        ({"sampling_params": [{}, {}]}, {"sglang"}),
    ],
)
def test_what_only_sglang_knows_goes_there(more: dict[str, Any], kinds: set[str]) -> None:
    """Everything else is asked of vLLM too."""
    assert Generate(msgspec.json.encode(SLIME | more)).kinds == kinds


def test_blanks_before_sequences_are_none_of_them() -> None:
    """However many: clients may lay out their JSON as they like."""
    for form, field in ((Completions, b"prompt"), (Generate, b"input_ids")):
        assert form(b'{"%b": [%b[1, 2] ]}' % (field, b" \n" * 200)).tokens == [2]
        assert form(b'{"%b": [7]}' % field).tokens == [1]


def test_a_part_s_question_has_its_rows_and_all_other_fields() -> None:
    """In the caller's own form as they are, also fields that nobody here knows."""
    assert asked(Completions(msgspec.json.encode(TRL | {"new": {"a": 1}})), "vllm") == {
        **TRL,
        "prompt": [[3]],
        "model": "net",
        "new": {"a": 1},
    }
    by_row = {"rid": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}], "new": 5}
    found = asked(Generate(msgspec.json.encode(SLIME | by_row)), "sglang")
    assert found == {**SLIME, "input_ids": [[3]], "rid": ["b"], "sampling_params": [{"n": 2}], "new": 5}


def test_questions_are_translated() -> None:
    """By the table of docs/how-to/llm-teachers.md."""
    scores = {"prompt": [[3]], "model": "net", "max_tokens": 1, "prompt_logprobs": 3}
    assert asked(Generate(msgspec.json.encode(SLIME)), "vllm") == scores
    of_sglang = {**SLIME, "input_ids": [[3]], "return_text_in_logprobs": False}
    of_sglang["sampling_params"] = {"max_new_tokens": 0, "temperature": 1.0}
    assert asked(Completions(msgspec.json.encode(TRL)), "sglang") == of_sglang
    own = {"sequences": [[1, 2], [3]], "prompt_lengths": [1, 1], "top_logprobs": 3}
    for kind, wanted in (("vllm", scores | {"temperature": 1.0}), ("sglang", of_sglang)):
        assert asked(SequenceLogprobs(msgspec.json.encode(own)), kind) == wanted
    tokens = {"token_ids": [3], "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 3}}
    assert asked(TokensInOut(msgspec.json.encode(tokens)), "sglang", range(1)) == of_sglang


@pytest.mark.parametrize("form", [Completions, Generate, SequenceLogprobs, TokensInOut])
@pytest.mark.parametrize("content", [b"", b"[]", b'{"prompt": {}}', b"{" * 5000, b'{"input_ids": 5}', b"\xff"])
def test_malformed_requests_are_refused(form: Any, content: bytes) -> None:
    """Never with another error."""
    with pytest.raises(RequestRefusedError):
        form(content)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Completions, {"prompt_logprobs": 2**40}),
        (Completions, {"prompt": [[2**40]]}),
        (SequenceLogprobs, {"sequences": [[1]], "prompt_lengths": [0], "top_logprobs": 10**9}),
        (Generate, {"input_ids": [[1]], "return_logprob": True, "sampling_params": {"n": 2}}),
        (Completions, {"n": HUGE, "prompt": [[1]] * 12}),
        (Completions, {"n": 2, "prompt": ["a"] * MOST_ROWS}),
        (Completions, {"prompt": [[1]] * (MOST_ROWS + 1)}),
    ],
)
def test_what_no_server_could_take_is_refused(request_: Any, said: dict[str, Any]) -> None:
    """Before anybody makes room for it, though the pool has no limits of its own."""
    content = msgspec.json.encode(TRL | said).replace(b'"huge"', b"9" * 4300)
    with pytest.raises(RequestRefusedError, match="allowed"):
        asked(request_(content), "vllm")


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (Completions, {"model": "A" * 100_000}),
        (Completions, {"model": "\U000e0001" * 100_000}),
        (Completions, {"model": "\x1b[31m\n\u202e"}),
        (Completions, {"prompt_logprobs": HUGE}),
        (SequenceLogprobs, {"sequences": [[1]], "prompt_lengths": [HUGE], "top_logprobs": 1}),
        (SequenceLogprobs, {"sequences": [[1]], "prompt_lengths": [0], "response_format": "A\x1b" * 100_000}),
    ],
)
def test_a_refusal_has_little_of_what_was_sent(form: Any, said: dict[str, Any]) -> None:
    """On one line, without control characters: it is logged, and sent back."""
    with pytest.raises(RequestRefusedError) as caught:
        asked(form(msgspec.json.encode(TRL | said).replace(b'"huge"', b"9" * 4300)), "vllm")
    assert len(str(caught.value)) < 25_000
    assert str(caught.value).isprintable()
