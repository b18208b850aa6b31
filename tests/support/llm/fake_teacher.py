"""A server that answers as vLLM, SGLang or `swift deploy` do; a process, `python fake_teacher.py KIND`.

Prints its URL. POST /behaviour {"slow_s": …, "fault": …} changes how it answers; GET /asked returns what it was asked.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.llm.scores import best, logprobs, rank

from edl_runtime.concurrency import first_completed
from edl_runtime.protocol.asgi_server import open_listener, serving

encode = msgspec.json.encode


class FakeTeacher:
    """Answers requests of one kind of server."""

    def __init__(self, kind: str, model: str, max_model_len: int) -> None:
        self.kind = kind
        self.model = model
        self.max_model_len = max_model_len
        self.slow_s = 0.0
        self.told = asyncio.Event()
        self.fault = ""
        self.counts: Counter[str] = Counter()

    async def health(self, _: Request) -> Response:
        return Response(status_code=503 if self.fault == "not ready" else 200)

    async def models(self, _: Request) -> Response:
        model = "other" if self.fault == "other model" else self.model
        about = {"id": model, "object": "model", "root": model, "max_model_len": self.max_model_len}
        return Response(encode({"object": "list", "data": [about]}))

    async def behave(self, request: Request) -> Response:
        given = msgspec.json.decode(await request.body())
        self.slow_s, self.fault = given.get("slow_s", 0.0), given.get("fault", "")
        self.told.set()
        self.told = asyncio.Event()
        return Response()

    async def asked(self, _: Request) -> Response:
        return Response(encode(self.counts))

    async def answer(self, request: Request) -> Response:
        """Answer any POST: slowly, wrongly, or rightly."""
        body = msgspec.json.decode(await request.body())
        self.counts["requests"] += 1
        self.counts["rows"] += len(rows_of(body))
        self.counts["running"] += 1
        try:
            gone = await first_completed(self._take_time(), _gone(request))
        finally:
            self.counts["running"] -= 1
        if gone:
            self.counts["gone"] += 1
            return Response(status_code=499)
        if self.fault == "refusal":
            return Response(encode({"error": {"message": "too much for me", "code": 400}}), 400)
        if self.fault == "other model":
            return Response(encode({"error": {"message": "no such model", "code": 404}}), 404)
        if self.fault == "error" or (self.fault == "error on 490" and 490 in rows_of(body)[0]):
            return Response(encode({"error": {"message": "out of memory"}}), 500)
        if body.get("stream") or self.fault == "drip":
            return StreamingResponse(self.stream(), media_type="text/event-stream")
        right = encode(getattr(self, _ANSWERS[request.url.path])(body))
        return Response(_SPOILT.get(self.fault, bytes)(right), media_type="application/json")

    async def _take_time(self) -> bool:
        """Wait `slow_s`, but only until it is told to behave otherwise; return False."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.slow_s):
                await self.told.wait()
        return False

    def completions(self, body: Any) -> Any:
        rows = rows_of(body)
        if isinstance(rows[0], str):
            rows_scores: list[Any] = [None] * len(rows)
        else:
            rows_scores = [self.scored(ids, body.get("prompt_logprobs")) for ids in rows]
        choices = [
            {"index": index, "text": f"of {self.model}", "logprobs": None, "finish_reason": "length"}
            | {"prompt_logprobs": scores}
            for index, scores in enumerate(rows_scores)
        ]
        tokens = sum(map(len, rows))
        usage = {"prompt_tokens": tokens, "completion_tokens": len(rows), "total_tokens": tokens + len(rows)}
        return {"id": "cmpl-1", "object": "text_completion", "model": self.model, "choices": choices, "usage": usage}

    def scored(self, ids: list[int], k: int | None) -> Any:
        """Return `prompt_logprobs` as vLLM has them: the token that is there first, at whatever rank."""
        if k is None:
            return None
        found: list[Any] = [None]
        for place in range(1, len(ids)):
            real = float(logprobs(ids, place)[ids[place]])
            entries = {ids[place]: (real, rank(ids, place))}
            for number, (logprob, token) in enumerate(best(ids, place, k), 1):
                entries.setdefault(token, (logprob, number))
            found.append(
                {
                    str(token): {"logprob": self.noisy(logprob), "rank": number, "decoded_token": f"t{token}"}
                    for token, (logprob, number) in entries.items()
                }
            )
        return found

    def tokens(self, body: Any) -> Any:
        scores = self.scored(body["token_ids"], body["sampling_params"].get("prompt_logprobs"))
        choice = {"index": 0, "token_ids": [7], "finish_reason": "length", "logprobs": None}
        return {"request_id": "1", "choices": [choice], "prompt_logprobs": scores}

    def generate(self, body: Any) -> Any:
        found = [self.item(ids, body) for ids in rows_of(body)]
        return found if isinstance(body["input_ids"][0], list) else found[0]

    def item(self, ids: list[int], body: Any) -> Any:
        k = body.get("top_logprobs_num", 0)
        places = range(1, len(ids))
        meta: dict[str, Any] = {"id": "1", "prompt_tokens": len(ids), "completion_tokens": 0, "cached_tokens": 0}
        if body.get("return_logprob"):
            real = [[self.noisy(float(logprobs(ids, place)[ids[place]])), ids[place], None] for place in places]
            meta["input_token_logprobs"] = [[None, ids[0], None], *real]
            tops = [[[self.noisy(one), token, None] for one, token in best(ids, place, k)] for place in places]
            meta["input_top_logprobs"] = [None, *tops]
        return {"text": "", "output_ids": [], "meta_info": meta}

    def infer(self, body: Any) -> Any:
        return [
            {"id": "1", "object": "chat.completion", "choices": [{"index": 0}], "prompt_logprobs": [request["uuid"]]}
            for request in body["infer_requests"]
        ]

    def chat(self, body: Any) -> Any:
        message = {"role": "assistant", "content": f"{len(body['messages'])} read"}
        return {"id": "1", "object": "chat.completion", "choices": [{"index": 0, "message": message}]}

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield three words; with the fault "held stream" the later ones once it is told to behave otherwise."""
        while self.fault == "drip":
            yield b" "
            await asyncio.sleep(0.1)
        for word in ("one", "two", "three"):
            yield b"data: " + encode({"choices": [{"index": 0, "delta": {"content": word}}]}) + b"\n\n"
            if self.fault == "broken stream":
                raise ConnectionAbortedError
            if self.fault == "held stream":
                self.counts["held"] += 1
                await self.told.wait()
        yield b"data: [DONE]\n\n"

    def noisy(self, logprob: float) -> float:
        return logprob - {"differs": self.counts["requests"], "other weights": 1}.get(self.fault, 0)


_ANSWERS = {
    "/v1/completions": "completions",
    "/inference/v1/generate": "tokens",
    "/generate": "generate",
    "/infer/": "infer",
    "/v1/chat/completions": "chat",
}


def rows_of(body: Any) -> list[Any]:
    """Return the sequences of a request."""
    for name in ("prompt", "input_ids", "token_ids", "infer_requests", "messages"):
        if name in body:
            found = body[name]
            return found if isinstance(found, list) and isinstance(found[0], list | dict | str) else [found]
    return []


_SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda _: b"<html>proxy error</html>",
    "half": lambda right: right[: len(right) // 2],
    "huge": lambda right: right[:-1] + b" " * (64 << 20) + right[-1:],
    "NaN": lambda right: right.replace(b'"logprob":-', b'"logprob":NaN,"x":-', 1).replace(b"[-", b"[NaN,", 1),
    "null": lambda right: right.replace(b'"logprob":-', b'"logprob":null,"x":-', 1).replace(b"[-", b"[null,", 1),
    "a row less": lambda right: encode(_changed(msgspec.json.decode(right), "a row less")),
    "a row more": lambda right: encode(_changed(msgspec.json.decode(right), "a row more")),
    "other ids": lambda right: encode(_changed(msgspec.json.decode(right), "other ids")),
}
"""What broken servers make of a right answer."""


def _changed(answer: Any, fault: str) -> Any:
    rows = answer if isinstance(answer, list) else answer["choices"]
    if fault == "a row less":
        rows.pop()
    elif fault == "a row more":
        rows.append(rows[-1])
    else:
        for row in rows:
            if "meta_info" in row:
                row["meta_info"]["input_token_logprobs"][-1][1] += 1
            else:
                row["prompt_logprobs"][-1] = {"499": {"logprob": -1.0, "rank": 1, "decoded_token": "x"}}
    return answer


async def _gone(request: Request) -> bool:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return True


async def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--max-model-len", type=int, default=4096)
    given = parser.parse_args()
    fake = FakeTeacher(given.kind, given.model, given.max_model_len)
    routes = [
        Route("/health", fake.health),
        Route("/ready", fake.health),
        Route("/v1/models", fake.models),
        Route("/behaviour", fake.behave, methods=["POST"]),
        Route("/asked", fake.asked),
        *(Route(path, fake.answer, methods=["POST"]) for path in _ANSWERS),
    ]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with serving(Starlette(routes=routes), open_listener("127.0.0.1", 0), connections=4000) as url:
        print(url, flush=True)  # noqa: T201 - whoever started it reads this
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main())
