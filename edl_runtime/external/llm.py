"""Watches a server of a language model, vLLM's, SGLang's or that of `swift deploy`, for `edl register`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.external.address import ServerAddress
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.errors import InferenceError, ModelNotReadyError, ProtocolError
from edl_runtime.protocol.llm import (
    RAW_LOGPROBS,
    TOKENS_IN_FLIGHT,
    Kind,
    LlmServer,
    ServedModel,
    llm_signature,
    served_models,
)
from edl_runtime.protocol.oip import TOKENIZER_EXTENSION, ModelSignature

HEALTH_PATHS: dict[Kind, str] = {"vllm": "/health", "sglang": "/ready", "swift": "/health"}
"""SGLang's /health computes a token each time."""

DEFAULT_MAX_LOGPROBS: dict[Kind, int] = {"vllm": 20, "sglang": -1, "swift": 20}


class LlmConnection:
    """A connection to a server of a language model that only watches it; raises as `TeacherConnection`."""

    def __init__(self, address: ServerAddress, client: TeacherConnection) -> None:
        """Raise SpecError for an address of another kind."""
        if address.llm is None:
            raise SpecError("scheme", address.scheme, "that of a language model")
        self._address = address
        self._kind: Kind = address.llm
        self._client = client

    def close(self) -> None:
        self._client.close()

    def ready(self) -> bool:
        """Return True. Raises ModelNotReadyError with the server's words, OSError, ProtocolError."""
        path = HEALTH_PATHS[self._kind]
        status, body = self._client.get_path(path)
        if status == 404 and self._kind == "sglang":  # an older one has no /ready
            status, body = self._client.get_path("/health")
        if status != 200:
            raise ModelNotReadyError(f"the server answers {status} {body[:200].decode('utf-8', 'replace')}".rstrip())
        return True

    def signature(self) -> ModelSignature:
        """Return what the pool has to know. Raises InferenceError if the server serves another model."""
        models = self._models()
        found = next((model for model in models if model.id == self._address.model), None)
        if found is None:
            ids = ", ".join(repr(model.id) for model in models[:20]) or "none"
            reason = f"it serves no model {self._address.model!r}, but {ids}"
            raise InferenceError(self._client.address, 404, reason, retryable=False)
        address, kind = self._address, self._kind
        known = describe_tokenizer(Path(found.root)) if found.root and not address.tokenizer else Tokenizer()
        digest = address.tokenizer or known.digest
        most = address.max_logprobs
        server = LlmServer(
            kind=kind,
            max_model_len=found.max_model_len,
            max_logprobs=DEFAULT_MAX_LOGPROBS[kind] if most is None else most,
            logprobs_mode=address.logprobs_mode or RAW_LOGPROBS,
            vocab_size=address.vocab_size or known.vocab_size,
            tokens_in_flight=address.tokens_in_flight or TOKENS_IN_FLIGHT,
        )
        return llm_signature(found.id, server, (TOKENIZER_EXTENSION + digest,) if digest else ())

    def _models(self) -> list[ServedModel]:
        status, body = self._client.get_path("/v1/models")
        if status != 200:
            reason = f"/v1/models: {body[:200].decode('utf-8', 'replace')}"
            raise InferenceError(self._client.address, status, reason, retryable=status >= 500)
        try:
            return served_models(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self._address}: its /v1/models is invalid: {error}") from None


class Tokenizer(msgspec.Struct, frozen=True):
    """A digest of what says what token numbers stand for, and how many there are; empty and None if unknown."""

    digest: str = ""
    vocab_size: int | None = None


class _Config(msgspec.Struct):
    vocab_size: int | None = None


_config_decoder = JsonDecoder(_Config)


def describe_tokenizer(folder: Path) -> Tokenizer:
    """Return what a model's folder tells: the digest of its tokenizer, and `vocab_size` of its config.json.

    Both are unknown for a folder that is not here. Raises ModelError for a tokenizer that can't be read.
    """
    from edl_runtime.teacher.models.model import tokenizer_in

    extension = next(iter(tokenizer_in(folder)), "")
    try:
        vocab_size = _config_decoder.decode((folder / "config.json").read_bytes()).vocab_size
    except (OSError, msgspec.DecodeError):
        vocab_size = None
    return Tokenizer(extension.removeprefix(TOKENIZER_EXTENSION), vocab_size)
