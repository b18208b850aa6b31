"""A gateway as trainers' clients use it: their requests, real sockets, processes and Redis; fake teachers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from support.llm.processes import POOL, World, post, sequences
from support.llm.processes import world as world_of
from support.llm.scores import best, logprobs
from support.teachers.process import PATIENCE_S, wait_until

from edl_runtime.store.redis_server import RedisServer

K = 5
SLIME = {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 0}


@pytest.fixture(scope="module")
def vllm(redis_server: RedisServer) -> Iterator[World]:
    """A pool of two vLLM servers."""
    with world_of(redis_server.url, "vllm", "vllm") as made:
        yield made


@pytest.fixture(scope="module")
def sglang(redis_server: RedisServer) -> Iterator[World]:
    """A pool of two SGLang servers."""
    with world_of(redis_server.url, "sglang", "sglang") as made:
        yield made


@pytest.fixture(scope="module")
def swift(redis_server: RedisServer) -> Iterator[World]:
    """A pool of two servers of `swift deploy`."""
    with world_of(redis_server.url, "swift", "swift") as made:
        yield made


@pytest.fixture(params=["vllm", "sglang"])
def world(request: pytest.FixtureRequest) -> World:
    """Either pool: a client does not see which teachers it has."""
    found: World = request.getfixturevalue(request.param)
    return found


def answered(url: str, body: Any) -> Any:
    """Return the JSON that answers a request."""
    response = post(url, body)
    assert response.status_code == 200, response.text
    return response.json()


def check_vllm_scores(found: Any, ids: list[int], k: int) -> None:
    """Check `prompt_logprobs` against the teachers' function: TRL sorts by rank and cuts, ms-swift takes the first."""
    assert len(found) == len(ids)
    assert found[0] is None
    for place, scores in enumerate(found[1:], 1):
        assert int(next(iter(scores))) == ids[place]
        assert scores[str(ids[place])]["logprob"] == logprobs(ids, place)[ids[place]]
        by_rank = sorted(scores.items(), key=lambda one: one[1]["rank"])[:k]
        assert [(one["logprob"], int(token)) for token, one in by_rank] == best(ids, place, k)


def test_trl_scores_a_batch_with_one_request(world: World) -> None:
    """TRL from 1.11 on: health, model, then all sequences at once; as many choices, in order, split over teachers."""
    rows = sequences(200, 40)
    before = world.rows_asked()
    with httpx.Client(base_url=world.url, timeout=PATIENCE_S, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("fake", 4096)
    body = {"model": "fake", "prompt": rows, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": K}
    answer = answered(f"{world.url}/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(rows)))
    for choice, ids in zip(answer["choices"], rows, strict=True):
        check_vllm_scores(choice["prompt_logprobs"], ids, K)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, rows))
    asked = [after - earlier for after, earlier in zip(world.rows_asked(), before, strict=True)]
    assert sum(asked) >= len(rows)
    assert min(asked) > 0


def test_trl_async_scores_one_flat_sequence(world: World) -> None:
    """Its prompt is one list of numbers; ms-swift up to 4.2 asks the same, with temperature 0 and one key of K = 0."""
    (ids,) = sequences(4, 40)[3:]
    for k, temperature in ((8, 1.0), (0, 0)):
        body = {"model": "fake", "prompt": ids, "max_tokens": 1, "temperature": temperature, "prompt_logprobs": k}
        (choice,) = answered(f"{world.url}/v1/completions", body)["choices"]
        check_vllm_scores(choice["prompt_logprobs"], ids, k)


@pytest.mark.parametrize("form", ["json", "binary"])
def test_trl_up_to_1_10_has_its_own_route(world: World, form: str) -> None:
    """Scores of the completions only, as nested lists or as base64 of padded arrays."""
    rows = sequences(6, 30)
    lengths = [1, 2, 1, 0, 3, 2]
    body = {"sequences": rows, "prompt_lengths": lengths, "top_logprobs": K, "temperature": 1.0}
    answer = answered(f"{world.url}/get_sequence_logprobs/", body | {"response_format": form})
    if form == "json":
        tops = [
            [list(zip(*pair, strict=True)) for pair in zip(values, ids, strict=True)]
            for values, ids in zip(answer["logprobs"], answer["logprob_token_ids"], strict=True)
        ]
    else:
        shape = answer["shape"]
        assert shape == [6, max(len(ids) - length for ids, length in zip(rows, lengths, strict=True)), K]
        arrays = {
            name: np.frombuffer(base64.b64decode(answer[f"{name}_b64"]), dtype).reshape(*shape[:2], -1)
            for name, dtype in (
                ("logprobs", np.float32),
                ("token_ids", np.int32),
                ("actual_logprobs", np.float32),
                ("actual_token_ids", np.int32),
            )
        }
        assert answer["completion_lengths"] == [len(ids) - length for ids, length in zip(rows, lengths, strict=True)]
        tops = [
            [
                list(zip(values.tolist(), ids.tolist(), strict=True))
                for values, ids in zip(arrays["logprobs"][row, :length], arrays["token_ids"][row, :length], strict=True)
            ]
            for row, length in enumerate(answer["completion_lengths"])
        ]
        place = lengths[1]
        assert arrays["actual_token_ids"][1, 0, 0] == rows[1][place]
        assert arrays["actual_logprobs"][1, 0, 0] == np.float32(logprobs(rows[1], place)[rows[1][place]])
    for top, ids, length in zip(tops, rows, lengths, strict=True):
        assert len(top) == len(ids) - length
        for place, found in enumerate(top, length):
            if place:
                wanted = best(ids, place, K)
                assert [token for _, token in found] == [token for _, token in wanted]
                assert np.allclose([one for one, _ in found], [one for one, _ in wanted])


def test_slime_scores_by_generate(world: World) -> None:
    """SGLang's request about one sequence; it reads the first item of each position behind the first."""
    (ids,) = sequences(4, 40)[3:]
    params = {"max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    meta = answered(f"{world.url}/generate", body)["meta_info"]
    first, *rest = meta["input_token_logprobs"]
    assert first[:2] == [None, ids[0]]
    assert [one[0] for one in rest] == [logprobs(ids, place)[ids[place]] for place in range(1, len(ids))]
    assert [one[1] for one in rest] == ids[1:]


@pytest.mark.parametrize("form", ["", "return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"])
def test_sglang_s_forms_are_made_of_vllm_s(vllm: World, form: str) -> None:
    """A list of sequences is answered by a list, with the best tokens in each of SGLang's forms."""
    rows = sequences(5, 30)
    body = {
        "input_ids": rows,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": K,
        **({form: True} if form else {}),
    }
    for item, ids in zip(answered(f"{vllm.url}/generate", body), rows, strict=True):
        meta = item["meta_info"]
        wanted = [best(ids, place, K) for place in range(1, len(ids))]
        if not form:
            assert [[(one, token) for one, token, _ in top] for top in meta["input_top_logprobs"][1:]] == wanted
            continue
        assert meta["input_top_logprobs_shape"] == [len(ids) - 1, K]
        assert meta["input_top_logprobs_null_prefix"] == 1
        if form.endswith("b64"):
            values = np.frombuffer(base64.b64decode(meta["input_top_logprobs_val_flat_b64"]), np.float32)
            tokens = np.frombuffer(base64.b64decode(meta["input_top_logprobs_idx_flat_b64"]), np.int32)
        else:
            values, tokens = meta["input_top_logprobs_val_flat"], meta["input_top_logprobs_idx_flat"]
        assert np.allclose(values, [one for top in wanted for one, _ in top])
        assert list(tokens) == [token for top in wanted for _, token in top]


def test_vime_scores_by_tokens_in_and_out(world: World) -> None:
    """One sequence a request; the scores are beside the choices."""
    (ids,) = sequences(4, 40)[3:]
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1}
    body = {"request_id": "r", "token_ids": ids, "sampling_params": params, "model": "fake", "stream": False}
    check_vllm_scores(answered(f"{world.url}/inference/v1/generate", body)["prompt_logprobs"], ids, 1)


def test_ms_swift_s_requests_are_cut_and_joined(swift: World) -> None:
    """From 4.3 on: the answer is a list, as long, in order, and nothing of it is changed."""
    before = swift.rows_asked()
    wanted = [{"messages": [{"role": "user", "content": "x" * 2000}], "uuid": f"u{row}"} for row in range(40)]
    body = {"infer_requests": wanted, "request_config": {"prompt_logprobs": K, "temperature": 0.0}, "metrics": None}
    for slash in ("", "/"):
        found = answered(f"{swift.url}/infer{slash}", body)
        assert [one["prompt_logprobs"] for one in found] == [[one["uuid"]] for one in wanted]
    assert all(after > earlier for after, earlier in zip(swift.rows_asked(), before, strict=True))
    assert httpx.get(f"{swift.url}/health/", timeout=PATIENCE_S, trust_env=False).status_code == 200


def test_chats_are_handed_on(world: World) -> None:
    """As they are, also as they come; so are completions of text."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "you"}]}
    (choice,) = answered(f"{world.url}/v1/chat/completions", body)["choices"]
    assert choice["message"]["content"] == "2 read"
    streamed = post(f"{world.url}/v1/chat/completions", body | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.count("data: ") == 4
    assert streamed.text.endswith("data: [DONE]\n\n")
    texts = answered(f"{world.url}/v1/completions", {"model": "fake", "prompt": ["a", "b"], "max_tokens": 5})
    assert [choice["index"] for choice in texts["choices"]] == [0, 1]


@pytest.mark.parametrize(
    ("route", "changed", "said"),
    [
        ("/v1/completions", {"prompt_logprobs": 21}, "allowed are 0 to 20"),
        ("/v1/completions", {"prompt_logprobs": -1}, "allowed are 0 to 20"),
        ("/v1/completions", {"prompt": [[1, 2], list(range(1, 4097))]}, "sequence 1 has 4096 tokens and 1"),
        ("/v1/completions", {"prompt": [[1, 2], []]}, "sequence 1 is empty"),
        ("/v1/completions", {"prompt": []}, "empty"),
        ("/v1/completions", {"prompt": [[1, -2]]}, "token -2"),
        ("/v1/completions", {"prompt": [[1, 2.5]]}, "Expected `int`"),
        ("/v1/completions", {"prompt": [[1, True]]}, "Expected `int`"),
        ("/v1/completions", {"temperature": 0.7}, "processed_logprobs"),
        ("/v1/completions", {"model": "other"}, "serves 'fake'"),
        ("/v1/completions", {"stream": True}, "stream"),
        ("/generate", SLIME | {"sampling_params": {"temperature": 2.0, "max_new_tokens": 0}}, "set it to 1.0"),
        ("/generate", {}, "input_ids"),
        ("/generate", {"input_ids": [1], "token_ids_logprob": [5]}, "needs sglang"),
        ("/infer/", {"infer_requests": [{}]}, "needs swift"),
        ("/get_sequence_logprobs/", {"sequences": [[1, 2]], "prompt_lengths": [1, 1], "top_logprobs": 5}, "prompt_len"),
        ("/get_sequence_logprobs/", {"sequences": [[1, 2]], "prompt_lengths": [3], "top_logprobs": 5}, "0 to 2"),
        ("/get_sequence_logprobs/", {"sequences": [[1, 2]], "prompt_lengths": [1]}, "logprobs is 100"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "empty"),
    ],
)
def test_what_no_teacher_can_answer_is_refused_at_once(
    vllm: World, route: str, changed: dict[str, Any], said: str
) -> None:
    """By a plain sentence, before anybody is asked."""
    before = vllm.rows_asked()
    body = {"model": "fake", "prompt": [[1, 2]], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": K}
    response = post(f"{vllm.url}{route}", (body if route == "/v1/completions" else {}) | changed)
    assert response.status_code == 400, response.text
    assert said in response.json()["error"]["message"]
    assert vllm.rows_asked() == before


def test_invalid_requests_are_refused(vllm: World) -> None:
    """With a reason, in JSON."""
    base = vllm.url.removesuffix(f"/pools/{POOL}")
    for path, content, status in (
        (f"/pools/{POOL}/v1/completions", b"{", 400),
        (f"/pools/{POOL}/v1/completions", b'{"prompt": ' + b"[" * 100_000, 400),
        (f"/pools/{POOL}/v1/completions", b'{"prompt": "\xff"}', 400),
        ("/pools/Bad_Name/v1/completions", b"{}", 400),
        (f"/pools/{POOL}/elsewhere", b"{}", 404),
    ):
        response = httpx.post(base + path, content=content, timeout=PATIENCE_S, trust_env=False)
        assert response.status_code == status, path
        assert response.json()["error"]["message"]
    assert "Bad_Name" not in httpx.get(f"{base}/metrics", timeout=PATIENCE_S, trust_env=False).text
    assert httpx.get(f"{vllm.url}/v1/completions", timeout=PATIENCE_S, trust_env=False).status_code == 405


def test_its_metrics_count_what_it_did(world: World) -> None:
    """By pool; also how many tokens wait, which autoscaling of teachers by others needs."""
    answered(f"{world.url}/v1/completions", {"prompt": [[1, 2, 3]], "max_tokens": 1, "prompt_logprobs": 1})
    text = httpx.get(world.url.replace(f"/pools/{POOL}", "/metrics"), timeout=PATIENCE_S, trust_env=False).text
    assert f'edl_gateway_requests_total{{pool="{POOL}",route="/v1/completions",status="200"}}' in text
    assert world.metric("tokens") >= 3
    assert world.metric("teachers") == 2
    wait_until(lambda: world.metric("tokens_in_flight") == 0)
