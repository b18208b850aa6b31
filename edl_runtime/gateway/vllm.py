"""Scores in vLLM's form: its `/v1/completions` with `prompt_logprobs`. No I/O."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Annotated

import msgspec
import numpy as np

from edl_runtime.errors import counted, one_line
from edl_runtime.gateway.scoring import BYTES_PER_SCORE, LARGEST_VOCABULARY, Positions, Score, Scoring, TokenId
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.errors import MOST_TOLD

COMPLETIONS = "/v1/completions"
MOST_NEGATIVE = -9999.0
"""In place of minus infinity, which JSON has not."""
LEAST = float(np.finfo(np.float32).min)
"""The least log-probability; servers mask tokens with this one, and callers keep them as float32."""
PIECE = 1 << 16
FEW_BYTES = 1 << 16
MOST_FIELDS = 10_000
"""Fields of an object in an answer, besides its text and scores, where it has more than `FEW_BYTES`."""
ROUNDING = 1e-3
"""A log-probability may be above 0, or above that of a better rank, by so much."""

Raw = msgspec.Raw
encode = msgspec.json.encode


class BadAnswerError(ValueError):
    """Raised when a teacher's answer is not one to its question; the text says what is wrong, on one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason, MOST_TOLD))


class Usage(msgspec.Struct):
    """Tokens that a teacher has read and put out."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    total_tokens: int = 0


class Answer(msgspec.Struct):
    """A part's answer: one JSON value a choice in `rows`, what is around them in `head`, and what it took."""

    rows: list[Raw]
    head: dict[str, Raw] = {}
    usage: Usage = msgspec.field(default_factory=Usage)


class _Choices(msgspec.Struct):
    choices: Raw
    usage: Usage | None = None
    prompt_logprobs: Raw = Raw(b"")


class _Choice(msgspec.Struct):
    prompt_logprobs: Raw = Raw(b"null")
    text: Raw = Raw(b"")
    logprobs: Raw = Raw(b"")


class _Object(msgspec.Struct):
    """Any object."""


class _Entry(msgspec.Struct):
    logprob: float
    rank: Annotated[int, msgspec.Meta(ge=1)]


_rank = attrgetter("rank")
_choices_decoder = JsonDecoder(_Choices)
_choice_decoder = JsonDecoder(_Choice)
_object_decoder = JsonDecoder(_Object)
fields_decoder = JsonDecoder(dict[str, Raw])
raws_decoder = JsonDecoder(list[Raw])
_position_decoder = JsonDecoder(dict[TokenId, _Entry] | None)


@lru_cache(maxsize=64)
def raws_of(count: int) -> JsonDecoder[tuple[Raw, ...]]:
    """Return a decoder of lists of so many values: one of more is refused before it takes memory."""
    return JsonDecoder(tuple[(Raw,) * count])  # type: ignore[misc]  # a type that is made here


def _check_fields(whole: bytes | Raw, *known: Raw) -> None:
    """Raise BadAnswerError if an object has so many fields, besides known ones, that they would take much memory."""
    if len(memoryview(whole)) - sum(len(memoryview(raw)) for raw in known) <= FEW_BYTES:
        return
    if bytes(whole).count(b":") - sum(bytes(raw).count(b":") for raw in known) > MOST_FIELDS:
        raise BadAnswerError(f"an object of its answer has more than {MOST_FIELDS:,} fields that are unknown")


def check_object(content: bytes) -> None:
    """Raise BadAnswerError for what is no JSON object; it is not kept."""
    check_text(content)
    try:
        _object_decoder.decode(content)
    except msgspec.DecodeError as error:
        raise BadAnswerError(f"its answer is no JSON object: {error}") from None


def question(model: str, rows: Sequence[Sequence[int]], scoring: Scoring) -> bytes:
    """Return the body of a request for scores."""
    temperature = {} if scoring.temperature is None else {"temperature": scoring.temperature}
    return encode({"model": model, "prompt": rows, "max_tokens": 1, **temperature, "prompt_logprobs": scoring.k})


def read_choices(content: bytes, count: int) -> Answer:
    """Return an answer with `count` choices. Raises BadAnswerError."""
    check_text(content)
    try:
        found = _choices_decoder.decode(content)
        _check_fields(content, found.choices, found.prompt_logprobs)
        choices, head = raws_of(count).decode(found.choices), fields_decoder.decode(content)
        for choice in choices:
            known = _choice_decoder.decode(choice)
            _check_fields(choice, known.prompt_logprobs, known.text, known.logprobs)
    except msgspec.DecodeError as error:
        raise BadAnswerError(f"its answer is no completion with {counted(count, 'choice')}: {error}") from None
    return Answer(list(choices), head, found.usage or Usage())


def check_text(content: bytes) -> None:
    """Raise BadAnswerError for what is not UTF-8."""
    if not content.isascii():
        decoder, view = getincrementaldecoder("utf-8")(), memoryview(content)
        try:
            for at in range(0, len(view), PIECE):  # as text, each byte could take four
                decoder.decode(view[at : at + PIECE])
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise BadAnswerError(f"its answer is not UTF-8: {error.reason}") from None


def check_scores(holder: Raw, ids: Sequence[int], count: int | None) -> None:
    """Raise BadAnswerError unless `prompt_logprobs` of a choice, or of a whole answer, scores these tokens.

    That is, each position has its token and `count` best ones (any number if None), whose log-probabilities are at most
    0 and fall with the rank.
    """
    for _ in _scored(holder, ids, count):
        pass


def _scored(holder: Raw, ids: Sequence[int], count: int | None) -> Iterator[Mapping[int, _Entry] | None]:
    """Yield the scores of each position; one is decoded at a time, as thousands would take much memory."""
    try:
        found = raws_of(len(ids)).decode(_choice_decoder.decode(holder).prompt_logprobs)
    except msgspec.DecodeError as error:
        raise BadAnswerError(f"its prompt_logprobs are no list of {len(ids)} positions: {error}") from None
    most_bytes = FEW_BYTES + BYTES_PER_SCORE * ((LARGEST_VOCABULARY if count is None else count) + 1)
    for place, (scores, token) in enumerate(zip(found, ids, strict=True)):
        if place == 0:
            yield None  # nothing is before it
            continue
        if len(memoryview(scores)) > most_bytes:
            raise BadAnswerError(f"the scores of position {place} take more than {most_bytes} bytes")
        try:
            entries = _position_decoder.decode(scores) or {}
        except msgspec.DecodeError as error:
            raise BadAnswerError(f"the scores of position {place} are invalid: {error}") from None
        if token not in entries:
            raise BadAnswerError(f"position {place} is scored without its token {token}")
        if count is not None and not count <= len(entries) <= count + 1:
            raise BadAnswerError(f"position {place} has {len(entries)} scores, and {count} were asked for")
        check_falling([entry.logprob for entry in sorted(entries.values(), key=_rank)], place)
        yield entries


def check_falling(logprobs: list[float], place: int) -> None:
    """Raise BadAnswerError unless log-probabilities, those of a position by rank, are `LEAST` to 0 and don't grow."""
    falling = sorted(logprobs, reverse=True)
    if falling and falling[-1] < LEAST:
        raise BadAnswerError(f"position {place} has a log-probability of {falling[-1]:g}, allowed is {LEAST:g} or more")
    if falling and falling[0] > ROUNDING:
        raise BadAnswerError(f"position {place} has a log-probability of {falling[0]:.4f}, allowed is 0 or less")
    if logprobs != falling and any(abs(one - two) > ROUNDING for one, two in zip(logprobs, falling, strict=True)):
        raise BadAnswerError(f"the log-probabilities of position {place} grow with their rank")


def positions_of(holder: Raw, ids: Sequence[int], count: int | None) -> Positions:
    """Return the scores in a choice, or a whole answer, about these tokens. Raises BadAnswerError as `check_scores`."""
    positions: Positions = []
    for found, token in zip(_scored(holder, ids, count), ids, strict=True):
        if found is None:
            positions.append(None)
            continue
        positions.append(real_first([Score(one, entry.logprob, entry.rank) for one, entry in found.items()], token))
    return positions


def real_first(scores: Sequence[Score], token: int) -> list[Score]:
    """Return the scores by rank, but those of `token` first."""
    return sorted(scores, key=lambda score: (score.token != token, score.rank))


def prompt_logprobs(positions: Positions) -> Raw:
    """Return `prompt_logprobs` with these scores."""
    return Raw(
        encode(
            [
                scores
                and {
                    score.token: {"logprob": score.logprob, "rank": score.rank, "decoded_token": None}
                    for score in scores
                }
                for scores in positions
            ]
        )
    )


def choice(positions: Positions) -> Raw:
    """Return a choice with these scores."""
    scores = prompt_logprobs(positions)
    return Raw(encode({"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "prompt_logprobs": scores}))


def join(answers: Sequence[Answer]) -> bytes:
    """Return one completion with all choices, in order, under new indices, and with the sum of their usage."""
    rows = (row for answer in answers for row in answer.rows)
    choices = [Raw(encode({**fields_decoder.decode(row), "index": index})) for index, row in enumerate(rows)]
    return encode({**answers[0].head, "choices": choices, "usage": added(answer.usage for answer in answers)})


def added(usages: Iterable[Usage]) -> Usage:
    """Return the sum of usages."""
    total = Usage()
    for usage in usages:
        total.prompt_tokens += usage.prompt_tokens
        total.completion_tokens = (total.completion_tokens or 0) + (usage.completion_tokens or 0)
        total.total_tokens += usage.total_tokens
    return total
