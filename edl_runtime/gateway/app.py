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
from starlette.types import ASGIApp, Receive, Scope, Send

from edl_runtime.concurrency import first_completed
from edl_runtime.errors import EdlError, SpecError
from edl_runtime.gateway import requests
from edl_runtime.gateway.errors import (
    FollowedPoolsError,
    NoGoodTeacherError,
    NoRoomError,
    PartFailedError,
    RequestRefusedError,
    RequestTooLargeError,
    TeacherFailedError,
)
from edl_runtime.gateway.gateway import Gateway
from edl_runtime.gateway.metrics import GatewayCollector
from edl_runtime.gateway.pool import FollowedPool
from edl_runtime.gateway.requests import BYTES_OF_A_BYTE, BodyMeter
from edl_runtime.gateway.room import Holding, Room
from edl_runtime.gateway.vllm import encode
from edl_runtime.log import get_logger
from edl_runtime.protocol.asgi_server import (
    BearerAuth,
    http_error_response,
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
MEMORY = 2 << 30
"""Most bytes of memory for the requests that are read or answered at a time."""
MOST_OF_POOL = 3 * MEMORY // 4
"""Most of it for the requests of one pool: other pools go on meanwhile."""
MOST_OF_CALLER = MEMORY // 2
"""Most of it for the requests of one caller, and so for one request: other callers of its pool go on meanwhile."""
MOST_OF_BODY = MEMORY // 4
"""Most of it for what is made of a body, which is read in one go."""
PIECE = 256 * 1024
READ_WITHIN_S = 60.0
READ_BYTES_A_SECOND = 64 * 1024
"""A caller reads its answer in so long at least, and as much longer as this rate takes."""
RETRY_AFTER_S = 5
"""What a caller is told that should ask again."""


_STATUS_CODES: dict[type[EdlError], int] = {
    SpecError: 400,
    RequestRefusedError: 400,
    RequestTooLargeError: 413,
    NoGoodTeacherError: 503,
    NoRoomError: 503,
    PartFailedError: 503,
    TeacherFailedError: 503,
    FollowedPoolsError: 503,
    RegistryUnavailableError: 503,
}

_FORMS: dict[str, Callable[[bytes], requests.Request]] = {
    "/v1/completions": requests.Completions,
    "/inference/v1/generate": requests.TokensInOut,
    "/generate": requests.Generate,
    "/get_sequence_logprobs/": requests.SequenceLogprobs,
    "/infer/": requests.SwiftInfer,
    "/v1/chat/completions": requests.Chat,
}
"""What is asked by POST, below a pool's URL."""

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
                Route(f"/pools/{{pool}}{slashed}", _Answering(routes, path, form), methods=["POST"])
                for path, form in _FORMS.items()
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
        exception_handlers={HTTPException: partial(http_error_response, refuse=_refusal)},
    )
    app.router.redirect_slashes = False
    return app


class _Routes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.wait_s = gateway.wait_s
        self._collector = GatewayCollector(gateway.pools)
        self.room = Room(MEMORY, MOST_OF_POOL, MOST_OF_CALLER)

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self._collector.render(), media_type=CONTENT_TYPE)

    async def health(self, request: HttpRequest) -> Response:
        async def answer(pool: FollowedPool) -> Response:
            if await pool.is_healthy():
                return json_response({"status": "ok"})
            return _refusal(f"pool {pool.name!r} has no good teacher; see `edl pools {pool.name}`", 503)

        return await self.answer(request, "/health", answer)

    async def models(self, request: HttpRequest) -> Response:
        async def answer(pool: FollowedPool) -> Response:
            model = await pool.model(requests.ALL_KINDS)
            about = {"id": model.id, "object": "model", "owned_by": "edl", "max_model_len": model.server.max_model_len}
            return json_response({"object": "list", "data": [about]})

        return await self.answer(request, "/v1/models", answer)

    async def answer(
        self, request: HttpRequest, path: str, answer: Callable[[FollowedPool], Awaitable[Response]]
    ) -> Response:
        """Return what `answer` does about the pool of the path; errors become answers, and are logged here."""
        name = ""  # what no pool is named may be anything, and is only in the refusal
        try:
            name = check_name("pool", request.path_params["pool"])
            async with self._gateway.pool(name) as pool:
                response = await answer(pool)
        except tuple(_STATUS_CODES) as error:
            status = next(status for kind, status in _STATUS_CODES.items() if isinstance(error, kind))
            log.warning("request.refused", pool=name, route=path, status=status, cause=str(error))
            response = _refusal(str(error), status)
            error.__traceback__ = error.__context__ = None  # a cycle by way of the frames, with the whole request
        if followed := self._gateway.pools.get(name):  # other names are anything that callers make up
            followed.stats.requests[path, response.status_code] += 1
        return response

    async def begin(self, request: HttpRequest, asked: requests.Request) -> Response:
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
                    yield _error_event(str(error))
                except asyncio.CancelledError:  # or the caller has hung up, and gets nothing
                    yield _error_event("the gateway has stopped before the answer's end; ask again")
                    raise

        return StreamingResponse(all_chunks(), media_type="text/event-stream")

    async def _chunks(self, name: str, asked: requests.Request) -> AsyncGenerator[bytes, None]:
        async with self._gateway.pool(name) as pool, aclosing(pool.stream(asked)) as chunks:
            async for chunk in chunks:
                yield chunk


class _Answering:
    """The application of a route whose requests have one form: a request's memory is held until its answer is sent."""

    def __init__(self, routes: _Routes, path: str, form: Callable[[bytes], requests.Request]) -> None:
        self._routes = routes
        self._path = path
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive)
        caller = request.client.host if request.client else ""
        with self._routes.room.opened(request.path_params["pool"], caller, self._routes.wait_s) as holding:

            async def answer(pool: FollowedPool) -> Response:
                await pool.wait_for_teacher()  # a body that waits for one would hold what others need
                body = await _read_body(request, holding)
                asked = await asyncio.to_thread(self._form, body)
                begin, streams = self._routes.begin, asked.streams
                answered = begin(request, asked) if streams else _whole(pool, asked, holding)
                return await first_completed(answered, _gone(request.receive))

            response = await self._routes.answer(request, self._path, answer)
            await response(scope, receive, send)


async def _read_body(request: HttpRequest, holding: Holding) -> bytes:
    """Return a request's body; what it takes until it is answered is held as it comes.

    Raises HTTPException for one that is late or broken off, RequestTooLargeError, NoRoomError.
    """

    def check(size: int) -> None:
        if size > MOST_OF_BODY:
            raise RequestTooLargeError(size >> 20, MOST_OF_BODY >> 20)

    meter = BodyMeter()

    async def hold(chunk: bytes) -> None:
        takes = meter.add(chunk)
        check(holding.size + takes)
        await holding.grow(takes)

    check(int(request.headers.get("Content-Length", 0)) * BYTES_OF_A_BYTE)
    return await read_body(request, limit=MOST_OF_BODY, within_s=BODY_WITHIN_S, hold=hold)


class _Whole(Response):
    """An answer that is sent in pieces, each once the one before has gone, to a caller that reads it."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - of every response
        content = memoryview(self.body)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(READ_WITHIN_S + len(content) / READ_BYTES_A_SECOND):
                for at in range(0, max(1, len(content)), PIECE):
                    piece, is_more = bytes(content[at : at + PIECE]), at + PIECE < len(content)
                    await send({"type": "http.response.body", "body": piece, "more_body": is_more})
        except TimeoutError:  # what is left of it is not sent: the connection closes
            log.warning("answer.not_read", pool=scope["path_params"]["pool"], bytes=len(content))


async def _whole(pool: FollowedPool, asked: requests.Request, holding: Holding) -> Response:
    return _Whole(await pool.answer(asked, holding))


async def _gone(receive: Receive) -> Response:
    await wait_disconnected(receive)
    return Response(status_code=DROPPED)


def _told(reason: str) -> dict[str, Any]:
    """Return a reason as OpenAI's servers tell it, whose clients show nothing of another form."""
    return {"error": {"message": reason}}


def _error_event(reason: str) -> bytes:
    return b"data: " + encode(_told(reason)) + b"\n\n"


def _refusal(reason: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    if status == 503:
        headers = {**(headers or {}), "Retry-After": str(RETRY_AFTER_S)}
    return json_response(_told(reason), status, headers)
