"""Trainers' own clients score sequences by a gateway."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.external_servers import environment, run_client
from support.llm.processes import fake_teacher, registered, running_gateway, sequences, wait_healthy
from support.llm.scores import best, logprobs

from edl_runtime.settings import RuntimeSettings

pytestmark = [pytest.mark.interop, pytest.mark.slow]

K = 5


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("trl", "more"),
    [("trl", {"chunk_size": 4}), ("trl-1-10", {"use_binary": True}), ("trl-1-10", {"use_binary": False})],
)
def test_trl_s_client_gets_the_teachers_scores(
    trl: str, more: dict[str, object], kind: str, settings: RuntimeSettings, tmp_path: Path
) -> None:
    """Of 1.16 and of 1.10, whichever server the teacher is; the token is in the URL."""
    environment(trl)
    secured = msgspec.structs.replace(settings, gateway_token="s3cret", lease_ttl_s=60.0)
    rows, lengths = sequences(10, 30), [1] * 10
    asked = {"sequences": rows, "prompt_lengths": lengths, "top_logprobs": K, "temperature": 1.0} | more
    with fake_teacher(kind) as fake, registered(secured, fake.address), running_gateway(secured) as url:
        with_token = url.replace("http://", "http://edl:s3cret@")
        wait_healthy(with_token)
        found = run_client(trl, "trl_client.py", with_token, json.dumps(asked), cwd=tmp_path)
    for values, tokens, ids in zip(found["logprobs"], found["logprob_token_ids"], rows, strict=True):
        wanted = [best(ids, place, K) for place in range(1, len(ids))]
        assert tokens == [[token for _, token in top] for top in wanted]
        assert np.allclose(np.array(values), [[one for one, _ in top] for top in wanted])
    if "actual_logprobs" in found:
        for actual, ids in zip(found["actual_logprobs"], rows, strict=True):
            there = [[logprobs(ids, place)[ids[place]]] for place in range(1, len(ids))]
            assert np.allclose(np.array(actual), there)
