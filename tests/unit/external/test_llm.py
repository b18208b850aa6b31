"""Servers of language models: their addresses, and what a pool has to know of them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from edl_runtime.errors import SpecError
from edl_runtime.external.address import ServerAddress
from edl_runtime.external.connection import connect
from edl_runtime.external.llm import Tokenizer, describe_tokenizer
from edl_runtime.protocol.llm import LlmServer, llm_server, llm_signature
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.registry.members import signature_differences
from edl_runtime.settings import RuntimeSettings

ADDRESS = (
    "vllm+http://gpu:8000/Qwen%2FQwen3-8B?max_logprobs=-1&vocab_size=151936&tokens_in_flight=9000"
    "&logprobs_mode=processed_logprobs&tokenizer=abc"
)


def test_an_address_says_what_the_server_does_not() -> None:
    """It is read as it is written."""
    address = ServerAddress.parse(ADDRESS)
    assert str(address) == ADDRESS
    assert (address.llm, address.model) == ("vllm", "Qwen/Qwen3-8B")
    assert (address.max_logprobs, address.tokens_in_flight) == (-1, 9000)
    assert ServerAddress.parse("oip+http://gpu:8000/net").llm is None


@pytest.mark.parametrize(
    "query", ["max_logprobs=-2", "max_logprobs=x", "tokens_in_flight=0", "logprobs_mode=raw_logits", "vocab=5"]
)
def test_other_values_are_refused(query: str) -> None:
    """By name."""
    with pytest.raises(SpecError, match=query.partition("=")[0]):
        ServerAddress.parse(f"vllm+http://gpu:8000/net?{query}")


def test_a_reader_is_told_who_asks_language_models() -> None:
    """Their scores are no tensors of a batch."""
    with pytest.raises(SpecError, match="edl gateway"):
        connect(ADDRESS, RuntimeSettings())


def test_a_folder_tells_the_tokenizer(tmp_path: Path) -> None:
    """Its digest and the number of tokens; nothing where there is no folder, as for a server of another machine."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    found = describe_tokenizer(tmp_path)
    assert len(found.digest) == 16
    assert found.vocab_size == 7
    (tmp_path / "config.json").write_text("no JSON")
    assert describe_tokenizer(tmp_path) == Tokenizer(found.digest)
    assert describe_tokenizer(tmp_path / "absent") == Tokenizer()


def test_limits_may_differ_in_a_pool_and_models_may_not() -> None:
    """What a caller would notice in the scores has to be the same."""
    one = LlmServer(kind="vllm", max_model_len=10, max_logprobs=5)
    other = msgspec.structs.replace(one, kind="sglang", max_model_len=20)
    assert llm_server(llm_signature("m", one, ())) == one
    assert signature_differences(*(llm_signature("m", server, ("tokenizer:a",)) for server in (one, other))) == []
    processed = msgspec.structs.replace(one, logprobs_mode="processed_logprobs")
    for changed, said in (
        (llm_signature("n", one, ("tokenizer:a",)), "name is n and the pool's m"),
        (llm_signature("m", one, ("tokenizer:b",)), "tokenizer is b and the pool's a"),
        (llm_signature("m", processed, ("tokenizer:a",)), "logprobs_mode is processed_logprobs"),
        (ModelSignature(name="m"), "input 'input_ids' is missing"),
    ):
        assert said in signature_differences(llm_signature("m", one, ("tokenizer:a",)), changed)[0]


def test_what_a_newer_server_tells_is_ignored() -> None:
    """A signature of another kind, or of a later version, is no language model to this one."""
    for extension in ("llm:{", 'llm:{"kind":"new"}', "join"):
        assert llm_server(ModelSignature(name="m", extensions=(extension,))) is None
    assert llm_server(None) is None
