"""The requests of trainers, each in its own form: how they are cut, what teachers are asked, how answers are joined.

No I/O. A request is read when it is made, checked against what the pool's teachers can do, and then answered in parts.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from edl_runtime.errors import clipped, counted
from edl_runtime.gateway import sglang, vllm
from edl_runtime.gateway.errors import RequestRefusedError
from edl_runtime.gateway.scoring import (
    ANSWER_LIMIT,
    LONGEST,
    MOST_ROWS,
    Positions,
    Scoring,
    check_count,
    check_sequences,
    choices_limit,
    top_k,
)
from edl_runtime.gateway.vllm import Answer, BadAnswerError, Raw, encode, fields_decoder, raws_decoder
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.llm import KINDS, Kind, LlmServer

BYTES_PER_TOKEN = 4
"""Of text, to reckon how long it is."""

ALL_KINDS = frozenset(KINDS)


BYTES_OF_A_BYTE = 3
WIDE = 5
"""More bytes that a byte of a text takes if a character of it is not ASCII: each of them takes four, and while the
text is widened the narrow one is there, too."""
_OF_VALUES = {b",": 48, b'"': 16, b"[": 96, b":": 128, b"{": 256}
"""Bytes of memory that a body takes until it is answered: for itself and what teachers are asked, and for its values.

CPython's numbers take up to 45 bytes in a list, short texts 80, lists 64 or more, objects 232 with their keys.
"""

WHOLE_TAKES = 3
"""Bytes of memory that a byte of an answer takes: as it came, cut into values, and joined."""
CHAT_LIMIT = 64 << 20


class BodyMeter:
    """Reckons the most bytes of memory that a body takes until it is answered, as its pieces come."""

    def __init__(self) -> None:
        self._size = 0
        self._is_wide = False
        self._last = b""

    def add(self, chunk: bytes) -> int:
        """Return what the body takes more, now that this piece of it has come."""
        takes = BYTES_OF_A_BYTE * len(chunk) + sum(chunk.count(sign) * size for sign, size in _OF_VALUES.items())
        self._size += len(chunk)
        if self._is_wide:
            takes += WIDE * len(chunk)
        elif not chunk.isascii() or b"\\u" in chunk or self._last + chunk[:1] == b"\\u":
            self._is_wide = True
            takes += WIDE * self._size
        self._last = chunk[-1:]
        return takes


class Question(NamedTuple):
    """What a teacher is asked: path, body, and the most bytes of its answer."""

    path: str
    body: bytes
    answer_limit: int = ANSWER_LIMIT


class PoolModel(NamedTuple):
    """What the teachers of a pool have in common: the model's id, and the least of their limits."""

    id: str
    server: LlmServer


def scores_question(kind: Kind, model: PoolModel, rows: Sequence[Sequence[int]], scoring: Scoring) -> Question:
    """Return what to ask a teacher of vLLM's or SGLang's form for the scores of these sequences."""
    limit = scoring.answer_limit(sum(map(len, rows)), model.server)
    if kind == "sglang":
        return Question(sglang.GENERATE, sglang.question(rows, scoring), limit)
    return Question(vllm.COMPLETIONS, vllm.question(model.id, rows, scoring), limit)


def read_scores(
    kind: Kind, content: bytes, rows: Sequence[Sequence[int]], scoring: Scoring, server: LlmServer
) -> tuple[Answer, Iterator[Positions]]:
    """Return the answer to `scores_question`, and the scores of one sequence after the other.

    Raises BadAnswerError, also while the scores are read.
    """
    if kind == "sglang":
        answer = sglang.read_items(content, len(rows))
        k = scoring.k or 0
        return answer, (sglang.positions_of(item, ids, k) for item, ids in zip(answer.rows, rows, strict=True))
    answer = vllm.read_choices(content, len(rows))
    count = scoring.count(server)
    return answer, (vllm.positions_of(choice, ids, count) for choice, ids in zip(answer.rows, rows, strict=True))


class Request(Protocol):
    """A trainer's request.

    - `tokens`: how many each row has, as far as that is known.
    - `kinds`: of the teachers that can answer it.
    - `streams`: whether its answer is to be handed on as it comes; such a request has one part.
    - `answer_takes`: bytes of memory that a byte of a teacher's answer takes.
    - `expected`: bytes of memory that its answer takes, as far as that is known; after `check`.
    - `hedged`: whether a second teacher may be asked when the first is slow; not where they generate for long.
    """

    streams: bool
    hedged: bool
    answer_takes: int
    expected: int
    tokens: list[int]
    kinds: frozenset[Kind]

    def check(self, model: PoolModel) -> None:
        """Raise RequestRefusedError for what no teacher of the pool can answer."""

    def question(self, kind: Kind, rows: range) -> Question:
        """Return what to ask a teacher of this kind about these rows; after `check`."""

    def read(self, kind: Kind, rows: range, content: bytes) -> Answer:
        """Return that teacher's answer in the form of this request. Raises BadAnswerError."""

    def join(self, answers: Sequence[Answer]) -> bytes:
        """Return the answer to the request, from those to all its parts, in order."""


def _decoded(decoder: JsonDecoder[Any], body: bytes | Raw, what: str = "the request") -> Any:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise RequestRefusedError(f"{what} is invalid: {error}") from None


_ids_decoder = JsonDecoder(list[int])
_rows_decoder = JsonDecoder(list[list[int]])
_text_decoder = JsonDecoder(str | list[str])


class Rows(NamedTuple):
    """Sequences of a request: `ids` of each, or `texts`; `single` if they were not in a list."""

    ids: list[list[int]]
    texts: list[str]
    single: bool

    @property
    def tokens(self) -> list[int]:
        return [len(one) for one in self.ids] or [len(one) // BYTES_PER_TOKEN + 1 for one in self.texts]

    def check(self, server: LlmServer, max_tokens: int) -> None:
        """Raise RequestRefusedError for what the pool's teachers can't take; only they know how long a text is."""
        if self.ids:
            check_sequences(self.ids, server, max_tokens)
        else:
            check_count(len(self.texts))

    def cut(self, rows: range) -> Any:
        """Return these rows as the request has them."""
        found: list[Any] = (self.ids or self.texts)[rows.start : rows.stop]
        return found[0] if self.single else found


_OPENING = re.compile(rb"\s*(\S)\s*(\S)")
"""The first two signs, behind any number of blanks."""


def _rows(raw: Raw, field: str) -> Rows:
    """Read token numbers or text, of one sequence or of several."""
    found_opening = _OPENING.match(memoryview(raw))
    opening = b"".join(found_opening.groups()) if found_opening else b""
    if opening[:1] == b'"' or opening == b'["':
        found = _decoded(_text_decoder, raw, field)
        return Rows([], [found], single=True) if isinstance(found, str) else Rows([], found, single=False)
    if opening == b"[[":
        return Rows(_decoded(_rows_decoder, raw, field), [], single=False)
    return Rows([_decoded(_ids_decoder, raw, field)], [], single=True)


def _check_model(given: str | None, model: PoolModel) -> None:
    if given and given != model.id:
        raise RequestRefusedError(f"the model is {clipped(given)!r}, but this pool serves {model.id!r}")


def _check_n(n: int) -> None:
    if not 1 <= n <= MOST_ROWS:
        raise RequestRefusedError(f"n is {clipped(str(n))}, allowed are 1 to {MOST_ROWS}")


def _longest(max_tokens: int | None, model: PoolModel) -> int:
    """Return how many tokens a choice may have."""
    most = model.server.max_model_len or LONGEST
    return min(max_tokens or most, most)


# vLLM's


class _Completion(msgspec.Struct):
    prompt: Raw
    model: str | None = None
    prompt_logprobs: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    n: int | None = None
    echo: bool | None = None
    stream: bool | None = None


_completion_decoder = JsonDecoder(_Completion)


class Completions:
    """vLLM's `/v1/completions`: TRL from 1.11 on, ms-swift up to 4.2."""

    answer_takes = WHOLE_TAKES
    expected = 0

    def __init__(self, body: bytes) -> None:
        """Raise RequestRefusedError."""
        view: _Completion = _decoded(_completion_decoder, body)
        self._fields: dict[str, Any] = _decoded(fields_decoder, body)
        self._view = view
        self._rows = _rows(view.prompt, "prompt")
        self._n = view.n or 1
        self._scoring = Scoring(k=view.prompt_logprobs, temperature=view.temperature, max_tokens=view.max_tokens or 0)
        self._model = PoolModel("", LlmServer(kind="vllm"))
        self.tokens = self._rows.tokens
        self.streams = bool(view.stream)
        self.hedged = view.prompt_logprobs is not None
        only_scores = self._rows.ids and self._n == 1 and not view.echo and view.logprobs is None
        translatable = only_scores and (view.max_tokens or 16) <= 1 and (view.prompt_logprobs or 0) >= 0
        self.kinds: frozenset[Kind] = ALL_KINDS
        if view.echo or view.prompt_logprobs is not None:
            self.kinds = frozenset(("vllm", "sglang") if translatable and not view.echo else ("vllm",))

    def check(self, model: PoolModel) -> None:
        if self.streams and self._scoring.k is not None:
            raise RequestRefusedError("a request with prompt_logprobs can't have stream")
        _check_n(self._n)
        self._model = model
        _check_model(self._view.model, model)
        self._scoring.check(model.server)
        self._rows.check(model.server, self._scoring.max_tokens)
        check_count(len(self.tokens) * self._n)
        self.expected = self.answer_takes * self._scoring.expected(sum(self.tokens), model.server)

    def question(self, kind: Kind, rows: range) -> Question:
        if kind == "sglang" and self._scoring.k is not None:
            return scores_question(kind, self._model, self._ids(rows), self._scoring)
        body = encode({**self._fields, "model": self._model.id, "prompt": self._rows.cut(rows)})
        if self._scoring.k is None:
            longest = _longest(self._view.max_tokens, self._model)
            limit = choices_limit(self._n * len(rows), len(body), longest, self._view.logprobs)
        else:
            limit = self._scoring.answer_limit(self._n * sum(self.tokens[_cut(rows)]), self._model.server)
        return Question(vllm.COMPLETIONS, body, limit)

    def read(self, kind: Kind, rows: range, content: bytes) -> Answer:
        k = self._scoring.k
        if kind == "sglang" and k is not None:
            answer, scores = read_scores(kind, content, self._ids(rows), self._scoring, self._model.server)
            answer.rows = [vllm.choice(positions) for positions in scores]
            answer.head = {"object": Raw(b'"text_completion"'), "model": Raw(encode(self._model.id))}
            return answer
        answer = vllm.read_choices(content, len(rows) * self._n)
        if k is not None and self._rows.ids:
            count = self._scoring.count(self._model.server)
            for place, choice in enumerate(answer.rows):
                vllm.check_scores(choice, self._rows.ids[rows.start + place // self._n], count)
        return answer

    def join(self, answers: Sequence[Answer]) -> bytes:
        return vllm.join(answers)

    def _ids(self, rows: range) -> list[list[int]]:
        return self._rows.ids[_cut(rows)]


class _SamplingParams(msgspec.Struct):
    prompt_logprobs: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    n: int | None = None
    logprobs: int | None = None
    prompt_logprob_token_ids: Any = None


class _Tokens(msgspec.Struct):
    token_ids: list[int]
    sampling_params: _SamplingParams = msgspec.field(default_factory=_SamplingParams)
    model: str | None = None
    stream: bool | None = None
    features: Any = None


_tokens_decoder = JsonDecoder(_Tokens)


class TokensInOut:
    """vLLM's `/inference/v1/generate` about one sequence: vime."""

    streams = False
    answer_takes = WHOLE_TAKES
    expected = 0

    def __init__(self, body: bytes) -> None:
        """Raise RequestRefusedError."""
        self._body = body
        self._view: _Tokens = _decoded(_tokens_decoder, body)
        params = self._view.sampling_params
        self._scoring = Scoring(
            k=params.prompt_logprobs, temperature=params.temperature, max_tokens=params.max_tokens or 0
        )
        self._model = PoolModel("", LlmServer(kind="vllm"))
        self.hedged = params.prompt_logprobs is not None
        self.tokens = [len(self._view.token_ids)]
        plain = (params.n or 1) == 1 and params.logprobs is None and params.prompt_logprob_token_ids is None
        plain = plain and self._view.features is None
        translatable = plain and (params.prompt_logprobs or 0) >= 0 and (params.max_tokens or 16) <= 1
        translatable = translatable and params.prompt_logprobs is not None
        self.kinds: frozenset[Kind] = frozenset(("vllm", "sglang") if translatable else ("vllm",))

    def check(self, model: PoolModel) -> None:
        if self._view.stream:
            raise RequestRefusedError("stream is true, allowed is false")
        _check_n(self._view.sampling_params.n or 1)
        self._model = model
        _check_model(self._view.model, model)
        self._scoring.check(model.server)
        check_sequences([self._view.token_ids], model.server, self._scoring.max_tokens)
        self.expected = self.answer_takes * self._scoring.expected(sum(self.tokens), model.server)

    def question(self, kind: Kind, rows: range) -> Question:  # noqa: ARG002 - there is one
        if kind == "sglang":
            return scores_question(kind, self._model, [self._view.token_ids], self._scoring)
        params = self._view.sampling_params
        if self._scoring.k is None:
            limit = choices_limit(
                params.n or 1, len(self._body), _longest(params.max_tokens, self._model), params.logprobs
            )
        else:
            limit = self._scoring.answer_limit(self.tokens[0], self._model.server)
        return Question("/inference/v1/generate", self._body, limit)

    def read(self, kind: Kind, rows: range, content: bytes) -> Answer:  # noqa: ARG002 - there is one
        ids = self._view.token_ids
        if kind == "sglang":
            answer, (positions,) = read_scores(kind, content, [ids], self._scoring, self._model.server)
            scores = vllm.prompt_logprobs(positions)
            choice = {"index": 0, "token_ids": [], "finish_reason": "length", "logprobs": None}
            whole = {"request_id": "", "choices": [choice], "prompt_logprobs": scores, "usage": answer.usage}
            return Answer([Raw(encode(whole))])
        vllm.read_choices(content, self._view.sampling_params.n or 1)
        if self._scoring.k is not None:
            vllm.check_scores(Raw(content), ids, self._scoring.count(self._model.server))
        return Answer([Raw(content)])

    def join(self, answers: Sequence[Answer]) -> bytes:
        return bytes(answers[0].rows[0])


# SGLang's

_FLAT = {"return_flat_raw_top_logprobs": "flat", "return_flat_raw_top_logprobs_b64": "b64"}

_NOT_BY_ROW = frozenset({"input_ids", "text", "token_ids_logprob"})


_NULL = Raw(b"null")


class _Generate(msgspec.Struct):
    input_ids: Raw = _NULL
    text: Raw = _NULL
    sampling_params: Raw = _NULL
    return_logprob: Any = None
    logprob_start_len: Any = None
    top_logprobs_num: Any = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    return_flat_raw_top_logprobs: bool | None = None
    return_flat_raw_top_logprobs_b64: bool | None = None


class _GenerateParams(msgspec.Struct):
    max_new_tokens: int | None = None
    temperature: float | None = None
    n: int | None = None


_generate_decoder = JsonDecoder(_Generate)
_generate_params_decoder = JsonDecoder(_GenerateParams)
_KNOWN = frozenset(field.name for field in msgspec.structs.fields(_Generate)) | {"model", "rid", "log_metrics"}


class Generate:
    """SGLang's `/generate`, about one sequence or a list: slime."""

    streams = False
    answer_takes = WHOLE_TAKES
    expected = 0

    def __init__(self, body: bytes) -> None:
        """Raise RequestRefusedError."""
        view: _Generate = _decoded(_generate_decoder, body)
        self._fields: dict[str, Any] = _decoded(fields_decoder, body)
        self._name = "text" if bytes(view.input_ids) == b"null" else "input_ids"
        raw = getattr(view, self._name)
        if bytes(raw) == b"null":
            raise RequestRefusedError("the request has neither input_ids nor text")
        self._rows = _rows(raw, self._name)
        self._streams = bool(view.stream)
        self._flat = next((form for name, form in _FLAT.items() if getattr(view, name)), "")
        if view.return_flat_raw_top_logprobs_b64:
            self._flat = "b64"
        self._model = PoolModel("", LlmServer(kind="sglang"))
        self.tokens = self._rows.tokens
        params = self._read_params(view.sampling_params)
        self._n = params.n or 1
        self.hedged = view.return_logprob is True
        k = view.top_logprobs_num or 0
        scored = view.return_logprob is True and isinstance(k, int)
        self._scoring = Scoring(
            k=k if scored else None, temperature=params.temperature, max_tokens=params.max_new_tokens or 0
        )
        translatable = (
            scored
            and bool(self._rows.ids)
            and view.logprob_start_len == 0
            and not view.return_text_in_logprobs
            and (params.max_new_tokens if params.max_new_tokens is not None else 16) <= 1
            and all(name in _KNOWN or bytes(raw) in (b"null", b"false") for name, raw in self._fields.items())
        )
        self.kinds: frozenset[Kind] = frozenset(("vllm", "sglang") if translatable else ("sglang",))

    def _read_params(self, raw: Raw) -> _GenerateParams:
        """Read sampling_params; those of each sequence differ where they are a list, and only SGLang knows them."""
        if bytes(memoryview(raw)[:1]) != b"{":
            return _GenerateParams()
        found: _GenerateParams = _decoded(_generate_params_decoder, raw, "sampling_params")
        return found

    def check(self, model: PoolModel) -> None:
        if self._streams:
            raise RequestRefusedError("stream is true, allowed is false")
        if self._n != 1:  # SGLang answers more items than it was asked about
            raise RequestRefusedError(f"n is {self._n}, allowed is 1")
        self._model = model
        self._scoring.check(model.server)
        self._rows.check(model.server, self._scoring.max_tokens)
        self.expected = self.answer_takes * self._scoring.expected(sum(self.tokens), model.server)

    def question(self, kind: Kind, rows: range) -> Question:
        if kind == "vllm":
            return scores_question(kind, self._model, self._rows.ids[_cut(rows)], self._scoring)
        limit = self._scoring.answer_limit(sum(self.tokens[_cut(rows)]), self._model.server)
        fields = {name: self._by_row(name, raw, rows) for name, raw in self._fields.items()}
        body = encode({**fields, self._name: self._rows.cut(rows)})
        return Question(sglang.GENERATE, body, ANSWER_LIMIT if self._scoring.k is None else limit)

    def _by_row(self, name: str, raw: Raw, rows: range) -> Raw:
        """Return a field about these rows: some are lists with a value for each sequence."""
        if self._rows.single or name in _NOT_BY_ROW or bytes(memoryview(raw)[:1]) != b"[":
            return raw
        values = _decoded(raws_decoder, raw, name)
        return Raw(encode(values[_cut(rows)])) if len(values) == len(self.tokens) else raw

    def read(self, kind: Kind, rows: range, content: bytes) -> Answer:
        ids, k = self._rows.ids[_cut(rows)], self._scoring.k
        if kind == "vllm":
            answer, scores = read_scores(kind, content, ids, self._scoring, self._model.server)
            answer.rows = [
                sglang.item(positions, one, k or 0, self._flat) for positions, one in zip(scores, ids, strict=True)
            ]
            return answer
        answer = sglang.read_items(content, len(rows), as_list=not self._rows.single)
        if k is not None:
            for item, one in zip(answer.rows, ids, strict=False):
                sglang.check_scores(item, one, k)
        return answer

    def join(self, answers: Sequence[Answer]) -> bytes:
        if self._rows.single:
            return bytes(answers[0].rows[0])
        return encode([row for answer in answers for row in answer.rows])


def _cut(rows: range) -> slice:
    return slice(rows.start, rows.stop)


# TRL's own server, up to 1.10


class _Sequences(msgspec.Struct):
    sequences: list[list[int]]
    prompt_lengths: list[int]
    top_logprobs: int = 100
    temperature: float = 1.0
    response_format: Literal["json", "binary"] = "json"


_sequences_decoder = JsonDecoder(_Sequences)

MOST_BINARY = 256 << 20
"""Bytes of the arrays of a binary answer; it takes four times as much while it is made."""


class SequenceLogprobs:
    """`/get_sequence_logprobs/` of TRL's own server, up to 1.10."""

    streams = False
    kinds: frozenset[Kind] = frozenset(("vllm", "sglang"))
    hedged = True
    answer_takes = 12  # scores are decoded to be joined
    expected = 0

    def __init__(self, body: bytes) -> None:
        """Raise RequestRefusedError."""
        self._view: _Sequences = _decoded(_sequences_decoder, body)
        self._scoring = Scoring(k=self._view.top_logprobs, temperature=self._view.temperature)
        self._model = PoolModel("", LlmServer(kind="vllm"))
        self.tokens = [len(ids) for ids in self._view.sequences]

    def check(self, model: PoolModel) -> None:
        view = self._view
        self._model = model
        if len(view.prompt_lengths) != len(view.sequences):
            raise RequestRefusedError(f"it has {len(view.prompt_lengths)} prompt_lengths to {len(view.sequences)}")
        if view.top_logprobs < 1:
            raise RequestRefusedError(f"top_logprobs is {view.top_logprobs}, allowed is 1 or more")
        self._scoring.check(model.server)
        check_sequences(view.sequences, model.server, self._scoring.max_tokens)
        self.expected = self.answer_takes * self._scoring.expected(sum(self.tokens), model.server)
        for row, (length, ids) in enumerate(zip(view.prompt_lengths, view.sequences, strict=True)):
            if not 0 <= length <= len(ids):
                raise RequestRefusedError(f"prompt_lengths[{row}] is {length}, allowed are 0 to {len(ids)}")
        if view.response_format == "binary":  # all rows are as long as the longest, and in base 64 too
            longest = max(len(ids) - length for length, ids in zip(view.prompt_lengths, view.sequences, strict=True))
            padded = 8 * len(view.sequences) * longest * (view.top_logprobs + 1)
            if padded > MOST_BINARY:
                raise RequestRefusedError(
                    f"its answer as binary takes {padded >> 20:,} MiB, as all of its {len(view.sequences):,} rows are "
                    f"as long as the longest, {longest:,}; allowed are {MOST_BINARY >> 20}: ask for json, or in parts"
                )
            self.expected += 4 * padded

    def question(self, kind: Kind, rows: range) -> Question:
        return scores_question(kind, self._model, self._view.sequences[_cut(rows)], self._scoring)

    def read(self, kind: Kind, rows: range, content: bytes) -> Answer:
        """Return each row as JSON of its scores from its prompt's end on."""
        rows_ids = self._view.sequences[_cut(rows)]
        _, scores = read_scores(kind, content, rows_ids, self._scoring, self._model.server)
        lengths = self._view.prompt_lengths[_cut(rows)]
        return Answer([Raw(encode(positions[length:])) for positions, length in zip(scores, lengths, strict=True)])

    def join(self, answers: Sequence[Answer]) -> bytes:
        rows = [_positions_decoder.decode(row) for answer in answers for row in answer.rows]
        return self._binary(rows) if self._view.response_format == "binary" else self._json(rows)

    def _json(self, rows: Sequence[Positions]) -> bytes:
        tops = [[top_k(scores or [], self._view.top_logprobs) for scores in positions] for positions in rows]
        return encode(
            {
                "logprobs": [[[one.logprob for one in top] for top in row] for row in tops],
                "logprob_token_ids": [[[one.token for one in top] for top in row] for row in tops],
            }
        )

    def _binary(self, rows: Sequence[Positions]) -> bytes:
        lengths = [len(positions) for positions in rows]
        most = max((len(scores or []) for positions in rows for scores in positions), default=0)
        shape = len(rows), max(lengths), min(self._view.top_logprobs, max(1, most))  # K may be above the vocabulary
        logprobs, ids = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32)
        actual, actual_ids = np.full((*shape[:2], 1), -np.inf, np.float32), np.zeros((*shape[:2], 1), np.int32)
        for row, positions in enumerate(rows):
            actual_ids[row, : len(positions), 0] = self._view.sequences[row][self._view.prompt_lengths[row] :]
            for place, scores in enumerate(positions):
                top = top_k(scores or [], shape[2])
                logprobs[row, place, : len(top)] = [one.logprob for one in top]
                ids[row, place, : len(top)] = [one.token for one in top]
                if scores:
                    actual[row, place, 0] = scores[0].logprob
        arrays = {"logprobs": logprobs, "token_ids": ids, "actual_logprobs": actual, "actual_token_ids": actual_ids}
        texts = {f"{name}_b64": base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()}
        return encode({**texts, "shape": shape, "completion_lengths": lengths})


_positions_decoder: JsonDecoder[Positions] = JsonDecoder(Positions)


# What is handed on


class _Infer(msgspec.Struct):
    infer_requests: list[Raw]


_infer_decoder = JsonDecoder(_Infer)


class SwiftInfer:
    """`/infer/` of `swift deploy`, whose teachers apply the template themselves: ms-swift from 4.3 on."""

    streams = False
    kinds: frozenset[Kind] = frozenset(("swift",))
    hedged = True
    answer_takes = WHOLE_TAKES
    expected = 0

    def __init__(self, body: bytes) -> None:
        """Raise RequestRefusedError."""
        self._requests: list[Raw] = _decoded(_infer_decoder, body).infer_requests
        self._fields: dict[str, Any] = _decoded(fields_decoder, body)
        self.tokens = [len(memoryview(raw)) // BYTES_PER_TOKEN + 1 for raw in self._requests]

    def check(self, model: PoolModel) -> None:  # noqa: ARG002 - the teacher does
        check_count(len(self._requests))

    def question(self, kind: Kind, rows: range) -> Question:  # noqa: ARG002 - there is one
        return Question("/infer/", encode({**self._fields, "infer_requests": self._requests[_cut(rows)]}))

    def read(self, kind: Kind, rows: range, content: bytes) -> Answer:  # noqa: ARG002 - there is one
        vllm.check_text(content)
        try:
            return Answer(list(vllm.raws_of(len(rows)).decode(content)))
        except msgspec.DecodeError as error:
            raise BadAnswerError(f"its answer is no list about {counted(len(rows), 'request')}: {error}") from None

    def join(self, answers: Sequence[Answer]) -> bytes:
        return encode([row for answer in answers for row in answer.rows])


class _Chat(msgspec.Struct):
    messages: list[Raw]
    model: str | None = None
    stream: bool | None = None


_chat_decoder = JsonDecoder(_Chat)


class Chat:
    """`/v1/chat/completions`, handed on as it is."""

    kinds: frozenset[Kind] = ALL_KINDS
    hedged = False
    answer_takes = WHOLE_TAKES
    expected = 0

    def __init__(self, body: bytes) -> None:
        """Raise RequestRefusedError."""
        self._body = body
        self._view: _Chat = _decoded(_chat_decoder, body)
        self.streams = bool(self._view.stream)
        self.tokens = [len(body) // BYTES_PER_TOKEN + 1]

    def check(self, model: PoolModel) -> None:
        _check_model(self._view.model, model)

    def question(self, kind: Kind, rows: range) -> Question:  # noqa: ARG002 - all have the same
        return Question("/v1/chat/completions", self._body, CHAT_LIMIT)

    def read(self, kind: Kind, rows: range, content: bytes) -> Answer:  # noqa: ARG002 - all have the same
        vllm.check_object(content)
        return Answer([Raw(content)])

    def join(self, answers: Sequence[Answer]) -> bytes:
        return bytes(answers[0].rows[0])
