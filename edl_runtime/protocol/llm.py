"""What a pool knows of a server of a language model: it travels as an extension of the model's signature."""

from __future__ import annotations

from typing import Literal

import msgspec

from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.oip import ModelSignature, TensorSpec

LLM_EXTENSION = "llm:"
"""Followed by the JSON of an `LlmServer`."""

Kind = Literal["vllm", "sglang", "swift"]
KINDS: tuple[Kind, ...] = ("vllm", "sglang", "swift")

RAW_LOGPROBS = "raw_logprobs"
LOGPROBS_MODES = (RAW_LOGPROBS, "processed_logprobs")
"""vLLM's `--logprobs-mode`, of those that are log-probabilities: with the first, temperature does not reach scores."""

TOKENS_IN_FLIGHT = 65_536


class LlmServer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a server of a language model is asked.

    - `kind`: whose protocol it speaks; "swift" is that of `swift deploy`.
    - `max_model_len`: most tokens of a sequence, those to come included; None if unknown.
    - `max_logprobs`: most scores of a position; -1 for any number.
    - `logprobs_mode`: vLLM's.
    - `vocab_size`: token numbers are below it; None if unknown.
    - `tokens_in_flight`: most tokens of requests that it is asked at a time; a longer request is sent alone.
    """

    kind: Kind
    max_model_len: int | None = None
    max_logprobs: int = 20
    logprobs_mode: str = RAW_LOGPROBS
    vocab_size: int | None = None
    tokens_in_flight: int = TOKENS_IN_FLIGHT


class ServedModel(msgspec.Struct):
    """A model that a server lists; `root`: its folder or its name elsewhere."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ServedModel]


_decoder = JsonDecoder(LlmServer)
_models_decoder = JsonDecoder(_Models)


def served_models(content: bytes) -> list[ServedModel]:
    """Return the models in an answer of `/v1/models`. Raises msgspec.DecodeError."""
    return _models_decoder.decode(content).data


def llm_signature(model: str, server: LlmServer, tokenizer: tuple[str, ...]) -> ModelSignature:
    """Return the signature of the model with that id; `tokenizer` is the extension that tells its digest, if known."""
    return ModelSignature(
        name=model,
        inputs=(TensorSpec("input_ids", "INT32", (-1, -1)),),
        outputs=(TensorSpec("logprobs", "FP32", (-1, -1, -1)),),
        extensions=(*tokenizer, LLM_EXTENSION + msgspec.json.encode(server).decode()),
    )


def llm_server(signature: ModelSignature | None) -> LlmServer | None:
    """Return what the signature tells of a server of a language model; None for any other model."""
    for extension in signature.extensions if signature else ():
        if extension.startswith(LLM_EXTENSION):
            try:
                return _decoder.decode(extension.removeprefix(LLM_EXTENSION))
            except msgspec.DecodeError:  # a newer one than this process knows
                return None
    return None
