"""Scores in SGLang's form: its `/generate` with `return_logprob`. No I/O."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from edl_runtime.errors import counted
from edl_runtime.gateway.scoring import Positions, Score, Scoring, TokenId, top_k
from edl_runtime.gateway.vllm import (
    LEAST,
    MOST_NEGATIVE,
    Answer,
    BadAnswerError,
    Usage,
    check_falling,
    check_text,
    encode,
    raws_of,
)
from edl_runtime.parsing import JsonDecoder

GENERATE = "/generate"

Raw = msgspec.Raw

_Entry = tuple[float | None, TokenId, str | None]


class _MetaInfo(msgspec.Struct):
    input_token_logprobs: list[_Entry] | None = None
    input_top_logprobs: list[list[_Entry] | None] | None = None
    input_top_logprobs_val_flat: list[float | None] | None = None
    input_top_logprobs_val_flat_b64: str | None = None
    input_top_logprobs_val_flat_b64_dtype: Literal["float16", "float32", "float64"] = "float32"
    input_top_logprobs_shape: tuple[int, int] = (0, 0)
    input_top_logprobs_null_prefix: int = 0


class _Item(msgspec.Struct):
    meta_info: _MetaInfo


class _Counts(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ItemCounts(msgspec.Struct):
    meta_info: _Counts


_item_decoder = JsonDecoder(_Item)
_counts_decoder = JsonDecoder(_ItemCounts)


def question(rows: Sequence[Sequence[int]], scoring: Scoring) -> bytes:
    """Return the body of a request for scores."""
    temperature = {} if scoring.temperature is None else {"temperature": scoring.temperature}
    return encode(
        {
            "input_ids": rows,
            "sampling_params": {"max_new_tokens": 0, **temperature},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": scoring.k or 0,
            "return_text_in_logprobs": False,
        }
    )


def read_items(content: bytes, count: int, *, as_list: bool = True) -> Answer:
    """Return an answer with `count` items, a list or a single one. Raises BadAnswerError."""
    check_text(content)
    try:
        items = list(raws_of(count).decode(content)) if as_list else [Raw(content)]
        metas = [_counts_decoder.decode(item).meta_info for item in items]
    except msgspec.DecodeError as error:
        raise BadAnswerError(f"its answer is none of /generate with {counted(count, 'item')}: {error}") from None
    prompt, completion = sum(one.prompt_tokens for one in metas), sum(one.completion_tokens for one in metas)
    return Answer(items, {}, Usage(prompt, completion, prompt + completion))


def check_scores(item: Raw, ids: Sequence[int], k: int) -> None:
    """Raise BadAnswerError unless an item scores the last of these tokens, as many as it has scores.

    Each position has `k` best tokens, in any of SGLang's three forms, whose log-probabilities are at most 0 and fall.
    """
    meta = _meta_info(item)
    found = meta.input_token_logprobs or []
    _check_tokens(found, ids[max(0, len(ids) - len(found)) :])
    if not k or not found:
        return
    if (values := _flat_values(meta)) is not None:
        prefix = meta.input_top_logprobs_null_prefix
        if values.shape != (len(found) - prefix, k) or prefix not in (0, 1):
            raise BadAnswerError(f"it has the best tokens of {len(values)} positions behind {prefix}, of {len(found)}")
        for place, row in enumerate(values.tolist(), prefix):
            check_falling(row, place)
    else:
        for place, (entry, top) in enumerate(zip(found, _tops(meta, len(found)), strict=True)):
            _check_position(entry, top, place, k)


def _meta_info(item: Raw) -> _MetaInfo:
    try:
        return _item_decoder.decode(item).meta_info
    except msgspec.DecodeError as error:
        raise BadAnswerError(f"its scores are invalid: {error}") from None


def _flat_values(meta: _MetaInfo) -> np.ndarray | None:
    """Return the log-probabilities of a shorter form, by position and rank; None if it is none."""
    shape = meta.input_top_logprobs_shape
    try:
        if (encoded := meta.input_top_logprobs_val_flat_b64) is not None:
            flat = np.frombuffer(base64.b64decode(encoded), meta.input_top_logprobs_val_flat_b64_dtype)
        elif (known := meta.input_top_logprobs_val_flat) is not None:
            flat = np.array([MOST_NEGATIVE if value is None else value for value in known])
        else:
            return None
        values = flat.reshape(shape)
    except ValueError as error:
        raise BadAnswerError(f"its best tokens are invalid: {error}") from None
    if np.isnan(values).any():
        raise BadAnswerError("a log-probability of its best tokens is not a number")
    return np.where(np.isneginf(values), LEAST, values)  # base 64 has no other way to say it


def _tops(meta: _MetaInfo, count: int) -> list[list[_Entry] | None]:
    tops = meta.input_top_logprobs or []
    if len(tops) != count:
        raise BadAnswerError(f"it has the best tokens of {len(tops)} positions, of {count}")
    return tops


def _check_position(entry: _Entry, top: list[_Entry] | None, place: int, k: int) -> None:
    logprob, token, _ = entry
    if logprob is None and place == 0:
        return  # nothing is before it
    if len(top or []) != k:
        raise BadAnswerError(f"position {place} has {len(top or [])} of {k} best tokens")
    values = [MOST_NEGATIVE if value is None else value for value, _, _ in top or []]
    is_among = any(one == token for _, one, _ in top or [])
    check_falling([*values, *([] if is_among or logprob is None else [logprob])], place)


def _check_tokens(found: Sequence[_Entry], ids: Sequence[int]) -> None:
    if len(found) != len(ids):
        raise BadAnswerError(f"it scored {len(found)} positions of {len(ids)} tokens")
    for place, ((logprob, token, _), wanted) in enumerate(zip(found, ids, strict=True)):
        if token != wanted or (logprob is None and place):
            raise BadAnswerError(f"position {place} scores token {token} with {logprob}, and {wanted} is there")
        check_falling([logprob or 0.0], place)


def positions_of(item: Raw, ids: Sequence[int], k: int) -> Positions:
    """Return the scores in an item about these tokens, with `k` others of each position. Raises BadAnswerError.

    The rank of a token that is not among them is k + 1: SGLang does not tell.
    """
    meta = _meta_info(item)
    tokens = meta.input_token_logprobs or []
    _check_tokens(tokens, ids)
    tops = _tops(meta, len(ids)) if k else [None] * len(ids)
    positions: Positions = []
    for place, ((logprob, token, _), top) in enumerate(zip(tokens, tops, strict=True)):
        if place == 0 or logprob is None:
            positions.append(None)
            continue
        _check_position((logprob, token, None), top if k else [], place, k)
        scores = [
            Score(one, MOST_NEGATIVE if value is None else value, rank)
            for rank, (value, one, _) in enumerate(top or [], 1)
        ]
        real = next((score for score in scores if score.token == token), Score(token, logprob, k + 1))
        positions.append([real, *(score for score in scores if score.token != token)])
    return positions


def item(positions: Positions, ids: Sequence[int], k: int, flat: str = "") -> Raw:
    """Return an item with these scores; `flat` is "" for lists of lists, "flat" or "b64" for SGLang's shorter forms."""
    first = [None, ids[0], None]
    tokens = [first, *([scores[0].logprob, scores[0].token, None] for scores in positions[1:] if scores)]
    meta: dict[str, Any] = {
        "prompt_tokens": len(ids),
        "completion_tokens": 0,
        "finish_reason": {"type": "length", "length": 0},
        "input_token_logprobs": tokens,
    }
    tops = [top_k(scores, k) for scores in positions[1:] if scores]
    if any(len(top) < k for top in tops):
        raise BadAnswerError(f"a position has fewer than {k} best tokens")
    if k and flat:
        meta |= _flat(tops, k, as_base64=flat == "b64")
    elif k:
        meta["input_top_logprobs"] = [None, *([[one.logprob, one.token, None] for one in top] for top in tops)]
    return Raw(encode({"text": "", "output_ids": [], "meta_info": meta}))


def _flat(tops: Sequence[Sequence[Score]], k: int, *, as_base64: bool) -> dict[str, Any]:
    values = np.array([[score.logprob for score in top] for top in tops], np.float32).reshape(-1, k)
    ids = np.array([[score.token for score in top] for top in tops], np.int32).reshape(-1, k)
    about = {"input_top_logprobs_shape": [len(tops), k], "input_top_logprobs_null_prefix": 1}
    name = "input_top_logprobs_{}_flat{}".format
    if not as_base64:
        return {name("val", ""): values.ravel().tolist(), name("idx", ""): ids.ravel().tolist(), **about}
    return {
        name("val", "_b64"): base64.b64encode(values.tobytes()).decode(),
        name("val", "_b64_dtype"): "float32",
        name("idx", "_b64"): base64.b64encode(ids.tobytes()).decode(),
        name("idx", "_b64_dtype"): "int32",
        **about,
    }
