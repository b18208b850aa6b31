"""Scores in vLLM's form: its `/v1/completions` with `prompt_logprobs`. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Annotated

import msgspec

from edl_runtime.errors import one_line
from edl_runtime.gateway.scoring import Positions, Score, Scoring, TokenId
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.errors import MOST_TOLD

COMPLETIONS = "/v1/completions"
MOST_NEGATIVE = -9999.0
"""In place of minus infinity, which JSON has not."""
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
    choices: list[Raw]
    usage: Usage | None = None


class _Entry(msgspec.Struct):
    logprob: float
    rank: Annotated[int, msgspec.Meta(ge=1)]


_rank = attrgetter("rank")
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
        raw = fields_decoder.decode(holder).get("prompt_logprobs")
        found = [] if raw is None else raws_decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise BadAnswerError(f"its prompt_logprobs are no list: {error}") from None
    if len(found) != len(ids):
        raise BadAnswerError(f"it scored {len(found)} positions of {len(ids)} tokens")
    for place, (scores, token) in enumerate(zip(found, ids, strict=True)):
        if place == 0:
            yield None  # nothing is before it
            continue
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
    """Raise BadAnswerError unless log-probabilities, those of a position by rank, are at most 0 and don't grow."""
    falling = sorted(logprobs, reverse=True)
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
