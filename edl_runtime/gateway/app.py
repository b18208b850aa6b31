"""The HTTP routes of a gateway, as trainers know them from vLLM, SGLang, TRL and ms-swift."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive

from edl_runtime.concurrency import first_completed
from edl_runtime.errors import EdlError, SpecError
from edl_runtime.gateway import requests
from edl_runtime.gateway.errors import (
    FollowedPoolsError,
    NoGoodTeacherError,
    NoRoomError,
    PartFailedError,
    RequestRefusedError,
    TeacherFailedError,
)
from edl_runtime.gateway.gateway import Gateway
from edl_runtime.gateway.metrics import GatewayCollector
from edl_runtime.gateway.pool import FollowedPool
from edl_runtime.gateway.room import Room
from edl_runtime.gateway.vllm import encode
from edl_runtime.log import get_logger
from edl_runtime.protocol.asgi_server import (
    BearerAuth,
    body_size,
    json_response,
    read_body,
    wait_disconnected,
)
from edl_runtime.registry.health import HEALTH_PATHS, health_routes, redis_problem
from edl_runtime.specs import check_name
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.teacher.metrics import CONTENT_TYPE, DROPPED

if TYPE_CHECKING:
    from redis.asyncio import Redis

BODY_WITHIN_S = 120.0
MEMORY = 1 << 30
"""Most bytes of memory for the requests that are read or answered at a time."""
NUMBERS = 12
TEXT = 4
"""Bytes of memory that a byte of a body takes until it is answered, of numbers as Python has them and of text."""
RETRY_AFTER_S = 5
"""What a caller is told that should ask again."""


_STATUS_CODES: dict[type[EdlError], int] = {
    SpecError: 400,
    RequestRefusedError: 400,
    NoGoodTeacherError: 503,
    NoRoomError: 503,
    PartFailedError: 503,
    TeacherFailedError: 503,
    FollowedPoolsError: 503,
    RegistryUnavailableError: 503,
}

_FORMS: dict[str, tuple[Callable[[bytes], requests.Request], int]] = {
    "/v1/completions": (requests.Completions, NUMBERS),
    "/inference/v1/generate": (requests.TokensInOut, NUMBERS),
    "/generate": (requests.Generate, NUMBERS),
    "/get_sequence_logprobs/": (requests.SequenceLogprobs, NUMBERS),
    "/infer/": (requests.SwiftInfer, TEXT),
    "/v1/chat/completions": (requests.Chat, TEXT),
}
"""What is asked by POST, below a pool's URL, and what a body consists of."""

log = get_logger(__name__)


def build_app(gateway: Gateway, client: Redis, *, token: str) -> ASGIApp:
    """Return the ASGI application; all routes but its own health require `token`, unless that is empty."""
    routes = _Routes(gateway)
    app = Starlette(
        routes=[
            *health_routes(partial(redis_problem, client)),
            Route("/metrics", routes.metrics),
            *(Route(f"/pools/{{pool}}{path}", routes.health) for path in ("/health", "/health/", "/ready")),
            Route("/pools/{pool}/v1/models", routes.models),
            *(
                Route(f"/pools/{{pool}}{slashed}", routes.answering(path, form, takes), methods=["POST"])
                for path, (form, takes) in _FORMS.items()
                for slashed in {path, path.removesuffix("/")}
            ),
        ],
        middleware=[
            Middleware(
                BearerAuth,
                token=token,
                variable="EDL_GATEWAY_TOKEN",
                open_paths=(HEALTH_PATHS,),
                as_password=True,
                refuse=_refusal,
            )
        ],
        exception_handlers={HTTPException: _http_refusal},
    )
    app.router.redirect_slashes = False
    return app


class _Routes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._collector = GatewayCollector(gateway.pools)
        self._room = Room(MEMORY)

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self._collector.render(), media_type=CONTENT_TYPE)

    async def health(self, request: HttpRequest) -> Response:
        async def answer(pool: FollowedPool) -> Response:
            if await pool.is_healthy():
                return json_response({"status": "ok"})
            return _refusal(f"pool {pool.name!r} has no good teacher; see `edl pools {pool.name}`", 503)

        return await self._answer(request, "/health", answer)

    async def models(self, request: HttpRequest) -> Response:
        async def answer(pool: FollowedPool) -> Response:
            model = await pool.model(requests.ALL_KINDS)
            about = {"id": model.id, "object": "model", "owned_by": "edl", "max_model_len": model.server.max_model_len}
            return json_response({"object": "list", "data": [about]})

        return await self._answer(request, "/v1/models", answer)

    def answering(
        self, path: str, form: Callable[[bytes], requests.Request], takes: int
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        """Return the endpoint of a route whose requests have this form; a byte of them `takes` so many of memory."""
        limit = MEMORY // takes

        async def endpoint(request: HttpRequest) -> Response:
            async def answer(pool: FollowedPool) -> Response:
                async with self._room.hold(body_size(request, limit) * takes, pool.wait_s):
                    body = await read_body(request, limit=limit, within_s=BODY_WITHIN_S)
                    asked = await asyncio.to_thread(form, body)
                    answered = self._begin(request, asked) if asked.streams else _whole(pool, asked)
                    return await first_completed(answered, _gone(request.receive))

            return await self._answer(request, path, answer)

        return endpoint

    async def _answer(
        self, request: HttpRequest, path: str, answer: Callable[[FollowedPool], Awaitable[Response]]
    ) -> Response:
        """Return what `answer` does about the pool of the path; errors become answers, and are logged here."""
        name = request.path_params["pool"]
        try:
            async with self._gateway.pool(check_name("pool", name)) as pool:
                response = await answer(pool)
        except tuple(_STATUS_CODES) as error:
            status = next(status for kind, status in _STATUS_CODES.items() if isinstance(error, kind))
            log.warning("request.refused", pool=name, route=path, status=status, cause=str(error))
            response = _refusal(str(error), status)
            error.__traceback__ = error.__context__ = None  # a cycle by way of the frames, with the whole request
        if followed := self._gateway.pools.get(name):  # other names are anything that callers make up
            followed.stats.requests[path, response.status_code] += 1
        return response

    async def _begin(self, request: HttpRequest, asked: requests.Request) -> Response:
        """Return a response that hands on a teacher's answer as it comes; its first bytes are there."""
        chunks = self._chunks(request.path_params["pool"], asked)
        first = await anext(chunks, b"")

        async def all_chunks() -> AsyncIterator[bytes]:
            async with aclosing(chunks):
                yield first
                try:
                    async for chunk in chunks:
                        yield chunk
                except TeacherFailedError as error:
                    log.warning("stream.failed", pool=request.path_params["pool"], cause=str(error))
                    yield b"data: " + encode(_told(str(error))) + b"\n\n"

        return StreamingResponse(all_chunks(), media_type="text/event-stream")

    async def _chunks(self, name: str, asked: requests.Request) -> AsyncGenerator[bytes, None]:
        async with self._gateway.pool(name) as pool, aclosing(pool.stream(asked)) as chunks:
            async for chunk in chunks:
                yield chunk


async def _whole(pool: FollowedPool, asked: requests.Request) -> Response:
    return Response(await pool.answer(asked), media_type="application/json")


async def _gone(receive: Receive) -> Response:
    await wait_disconnected(receive)
    return Response(status_code=DROPPED)


def _told(reason: str) -> dict[str, Any]:
    """Return a reason as OpenAI's servers tell it, whose clients show nothing of another form."""
    return {"error": {"message": reason}}


def _refusal(reason: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    if status == 503:
        headers = {**(headers or {}), "Retry-After": str(RETRY_AFTER_S)}
    return json_response(_told(reason), status, headers)


async def _http_refusal(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 -- registered for nothing else
    return _refusal(error.detail, error.status_code, error.headers)
