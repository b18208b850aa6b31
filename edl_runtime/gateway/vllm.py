"""Scores in vLLM's form: its `/v1/completions` with `prompt_logprobs`. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from edl_runtime.gateway.scoring import Positions, Score, Scoring, TokenId
from edl_runtime.parsing import JsonDecoder

COMPLETIONS = "/v1/completions"
MOST_NEGATIVE = -9999.0
"""In place of minus infinity, which JSON has not."""

Raw = msgspec.Raw
encode = msgspec.json.encode


class BadAnswerError(ValueError):
    """Raised when a teacher's answer is not one to its question; the text says what is wrong."""


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
    choices: list[Raw]
    usage: Usage | None = None


class _Entry(msgspec.Struct):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


_choices_decoder = JsonDecoder(_Choices)
fields_decoder = JsonDecoder(dict[str, Raw])
raws_decoder = JsonDecoder(list[Raw])
_position_decoder = JsonDecoder(dict[TokenId, _Entry] | None)


def question(model: str, rows: Sequence[Sequence[int]], scoring: Scoring) -> bytes:
    """Return the body of a request for scores."""
    temperature = {} if scoring.temperature is None else {"temperature": scoring.temperature}
    return encode({"model": model, "prompt": rows, "max_tokens": 1, **temperature, "prompt_logprobs": scoring.k})


def read_choices(content: bytes, count: int) -> Answer:
    """Return an answer with `count` choices. Raises BadAnswerError."""
    check_text(content)
    try:
        found, head = _choices_decoder.decode(content), fields_decoder.decode(content)
    except msgspec.DecodeError as error:
        raise BadAnswerError(f"its answer is no completion: {error}") from None
    if len(found.choices) != count:
        raise BadAnswerError(f"it answered {len(found.choices)} choices to {count}")
    if any(bytes(memoryview(choice)[:1]) != b"{" for choice in found.choices):
        raise BadAnswerError("a choice of its answer is no object")
    return Answer(found.choices, head, found.usage or Usage())


def check_text(content: bytes) -> None:
    """Raise BadAnswerError for what is not UTF-8."""
    if not content.isascii():
        try:
            content.decode()
        except UnicodeDecodeError as error:
            raise BadAnswerError(f"its answer is not UTF-8: {error.reason}") from None


def check_scores(holder: Raw, ids: Sequence[int]) -> None:
    """Raise BadAnswerError unless `prompt_logprobs` of a choice, or of a whole answer, scores these tokens."""
    _scored(holder, ids)


def _scored(holder: Raw, ids: Sequence[int]) -> list[Raw]:
    try:
        raw = fields_decoder.decode(holder).get("prompt_logprobs")
        found = [] if raw is None else raws_decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise BadAnswerError(f"its prompt_logprobs are no list: {error}") from None
    if len(found) != len(ids):
        raise BadAnswerError(f"it scored {len(found)} positions of {len(ids)} tokens")
    text = bytes(raw or b"")
    if b'"logprob":null' in text or b'"logprob": null' in text:
        raise BadAnswerError("it scored a token with null")
    for place, (scores, token) in enumerate(zip(found[1:], ids[1:], strict=True), 1):
        # vLLM puts the token that is there first; reading no further is what makes this cheap
        if not bytes(memoryview(scores)[:24]).startswith(b'{"%d":' % token) and token not in _decode(scores, place):
            raise BadAnswerError(f"position {place} is scored without its token {token}")
    return found


def _decode(scores: Raw, place: int) -> Mapping[int, _Entry]:
    try:
        return _position_decoder.decode(scores) or {}
    except msgspec.DecodeError as error:
        raise BadAnswerError(f"the scores of position {place} are invalid: {error}") from None


def positions_of(holder: Raw, ids: Sequence[int]) -> Positions:
    """Return the scores in a choice, or a whole answer, about these tokens. Raises BadAnswerError."""
    positions: Positions = []
    for place, (raw, token) in enumerate(zip(_scored(holder, ids), ids, strict=True)):
        found = _decode(raw, place)
        if place == 0 or not found:
            positions.append(None)
            continue
        scores = [
            Score(one, entry.logprob, entry.rank or place_) for place_, (one, entry) in enumerate(found.items(), 1)
        ]
        positions.append(real_first(scores, token))
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
    rows = [row for answer in answers for row in answer.rows]
    choices = [{**fields_decoder.decode(row), "index": index} for index, row in enumerate(rows)]
    return encode({**answers[0].head, "choices": choices, "usage": added(answer.usage for answer in answers)})


def added(usages: Iterable[Usage]) -> Usage:
    """Return the sum of usages."""
    total = Usage()
    for usage in usages:
        total.prompt_tokens += usage.prompt_tokens
        total.completion_tokens = (total.completion_tokens or 0) + (usage.completion_tokens or 0)
        total.total_tokens += usage.total_tokens
    return total
