"""The endpoint's routes: who may ask what, and what is answered."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edl_runtime.decoding import Decoder
from edl_runtime.discovery.hub import Hub
from edl_runtime.discovery.messages import SAY_EVERY_S, Words
from edl_runtime.discovery.stream import Stream, student_id
from edl_runtime.errors import EdlError, PoolLimitError, RegistryUnavailableError, SpecError, UnknownPoolError
from edl_runtime.registry.pools import view_pool, view_pools
from edl_runtime.specs import check_name
from edl_runtime.store.client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

WORDS_LIMIT = 64 * 1024
"""Most bytes of what a student says at once."""
WORDS_WITHIN_S = SAY_EVERY_S
"""How long a student may take to say it."""

WELCOME = "edl.welcome"
"""In a request's state: what to call when it has shown the token."""

_OPEN_TO_ALL = "/v1/health/"
_STATUS: dict[type[EdlError], int] = {
    SpecError: 400,
    UnknownPoolError: 404,
    PoolLimitError: 503,
    RegistryUnavailableError: 503,
}


def build_app(hub: Hub, client: Redis, namespace: str, *, token: str) -> ASGIApp:
    """Return the ASGI application; all but health asks for `token`, unless that is empty."""
    routes = _Routes(hub, client, namespace)
    return Starlette(
        routes=[
            Route("/v1/health/live", routes.live),
            Route("/v1/health/ready", routes.ready),
            Route("/v1/pools", routes.pools),
            Route("/v1/pools/{pool}", routes.pool),
            Route("/v1/pools/{pool}/students/{student}", Stream(hub), methods=["GET"]),
            Route("/v1/pools/{pool}/students/{student}/words", routes.words, methods=["PUT"]),
        ],
        middleware=[Middleware(TokenGate, token=token)],
        exception_handlers={HTTPException: _refuse, **dict.fromkeys(_STATUS, _explain)},
    )


class TokenGate:
    """Lets requests through that have the token, and those about health; tells the server whose client has it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._wanted = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        welcome = not self._wanted or hmac.compare_digest(given, self._wanted)
        if welcome and (tell := scope.get("state", {}).get(WELCOME)):
            tell()
        if welcome or scope["path"].startswith(_OPEN_TO_ALL):
            await self._app(scope, receive, send)
            return
        refusal = _json(
            {"error": "the bearer token is missing or wrong; it is in EDL_DISCOVERY_TOKEN"},
            401,
            {"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)


class _Routes:
    def __init__(self, hub: Hub, client: Redis, namespace: str) -> None:
        self._hub = hub
        self._client = client
        self._namespace = namespace

    async def live(self, _: Request) -> Response:
        return _json({"live": True})

    async def ready(self, _: Request) -> Response:
        try:
            with unavailable_if_lost(self._client):
                await self._client.ping()
        except RegistryUnavailableError:  # where Redis is, is not for everybody
            return _json({"ready": False, "error": "Redis can't be used"}, 503)
        return _json({"ready": True})

    async def pools(self, _: Request) -> Response:
        return _json(await view_pools(self._client, self._namespace))

    async def pool(self, request: Request) -> Response:
        name = check_name("pool", request.path_params["pool"])
        return _json(await view_pool(self._client, self._namespace, name))

    async def words(self, request: Request) -> Response:
        pool, student = check_name("pool", request.path_params["pool"]), student_id(request.path_params["student"])
        said = await _words(request)
        if not await self._hub.hear(pool, student, said):
            raise HTTPException(
                404, f"no student {student!r} of pool {pool!r} is connected here; open its stream first"
            )
        return Response(status_code=204)


_words_decoder = Decoder(Words)


async def _words(request: Request) -> Words:
    body = bytearray()
    try:
        async with asyncio.timeout(WORDS_WITHIN_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > WORDS_LIMIT:
                    raise HTTPException(413, f"{WORDS_LIMIT} bytes are allowed")
        return _words_decoder.decode(body)
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {WORDS_WITHIN_S:.0f} s") from None
    except msgspec.DecodeError as error:
        raise HTTPException(400, str(error)) from None


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 -- registered for nothing else
    return _json({"error": error.detail}, error.status_code, dict(error.headers or {}))


async def _explain(_: Request, error: Exception) -> Response:
    status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
    return _json({"error": str(error)}, status)
