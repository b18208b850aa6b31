"""How fast a gateway hands on the scores of language models: tokens a second, bytes, and its CPU.

    python benchmarks/gateway.py [--k K] [--tokens TOKENS] [--rows ROWS] [--teachers N] [--json]

The teachers, in a process of their own, answer at once with scores that they have made before, so that what is measured
is the gateway, against the same requests to one of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from _flags import at_least_1
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edl_runtime.protocol.asgi_server import open_listener, serving
from edl_runtime.store.redis_server import RedisServer

POOL = "net"
TIMES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=at_least_1, default=64, help="scores of each token")
    parser.add_argument("--tokens", type=at_least_1, default=1024, help="of each sequence")
    parser.add_argument("--rows", type=at_least_1, default=16, help="sequences of a request")
    parser.add_argument("--teachers", type=at_least_1, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(teach())
        return
    found = measure(given)
    if given.json:
        print(msgspec.json.encode(found).decode())
        return
    for name, value in found.items():
        print(f"{name:>32}: {value}")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    rows = [[(row + place) % 30_000 for place in range(given.tokens)] for row in range(given.rows)]
    body = {"model": POOL, "prompt": rows, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": given.k}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer(Path(folder)))
        env = {**os.environ, "EDL_REDIS_URL": redis.url}
        urls = [started(stack, env, __file__, "--serve")[0] for _ in range(given.teachers)]
        edl = ("-m", "edl_runtime.cli")
        servers = [word for url in urls for word in ("--server", f"vllm+{url}/{POOL}?max_logprobs=-1")]
        started(stack, env, *edl, "register", "--pool", POOL, *servers)
        line, process = started(stack, env, *edl, "gateway", "--json")
        gateway = psutil.Process(process.pid)
        url = msgspec.json.decode(line)["url"] + f"/pools/{POOL}"
        with httpx.Client(timeout=600, trust_env=False) as client:
            while client.get(f"{url}/health").status_code != 200:
                time.sleep(0.05)
            direct_s, _, size = median(lambda: ask(client, urls[0], body), gateway)
            by_gateway_s, cpu_s, _ = median(lambda: ask(client, url, body), gateway)
    tokens = given.rows * given.tokens
    return {
        "answer, MB": round(size / 1e6, 1),
        "one teacher, s": round(direct_s, 3),
        "gateway, s": round(by_gateway_s, 3),
        "gateway, tokens/s": round(tokens / by_gateway_s),
        "gateway, MB/s": round(size / 1e6 / by_gateway_s, 1),
        "gateway, CPU s per million tokens": round(cpu_s / tokens * 1e6, 1),
    }


def ask(client: httpx.Client, url: str, body: Any) -> int:
    response = client.post(f"{url}/v1/completions", json=body)
    response.raise_for_status()
    return len(response.content)


def median(run: Callable[[], int], process: psutil.Process) -> tuple[float, float, int]:
    """Return the middle of `TIMES` times and CPU times, and the size, after one run more."""
    run()
    walls, cpus, size = [], [], 0
    for _ in range(TIMES):
        began, cpu = time.monotonic(), sum(process.cpu_times()[:2])
        size = run()
        walls.append(time.monotonic() - began)
        cpus.append(sum(process.cpu_times()[:2]) - cpu)
    return sorted(walls)[TIMES // 2], sorted(cpus)[TIMES // 2], size


def started(stack: contextlib.ExitStack, env: dict[str, str], *command: str) -> tuple[str, subprocess.Popen[str]]:
    """Start Python with these arguments; return its first line, and itself. It ends with the stack."""
    process = stack.enter_context(running(env, *command))
    assert process.stdout is not None
    return process.stdout.readline().strip(), process


@contextlib.contextmanager
def running(env: dict[str, str], *command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def teach() -> None:
    """Serve scores that are made once for each sequence."""
    made: dict[str, bytes] = {}

    async def models(_: Request) -> Response:
        return Response(msgspec.json.encode({"data": [{"id": POOL, "max_model_len": 100_000}]}))

    async def answer(request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        choices = [msgspec.Raw(choice(made, ids, body["prompt_logprobs"])) for ids in body["prompt"]]
        return Response(msgspec.json.encode({"object": "text_completion", "choices": choices}))

    routes = [
        Route("/health", models),
        Route("/v1/models", models),
        Route("/v1/completions", answer, methods=["POST"]),
    ]
    async with serving(Starlette(routes=routes), open_listener("127.0.0.1", 0), connections=100) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


def choice(made: dict[str, bytes], ids: list[int], k: int) -> bytes:
    key = f"{k} {len(ids)} {ids[0]}"
    if key not in made:
        scores = [
            {
                str(token): {"logprob": -1.2345678 - rank, "rank": rank, "decoded_token": f" word{rank}"}
                for rank, token in enumerate([real, *range(40_000, 40_000 + k)], 1)
            }
            for real in ids[1:]
        ]
        made[key] = msgspec.json.encode({"index": 0, "text": "", "prompt_logprobs": [None, *scores]})
    return made[key]


if __name__ == "__main__":
    main()
