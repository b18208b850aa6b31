"""The health routes of our HTTP servers: that it runs, and that it is ready."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edl_runtime.protocol.asgi_server import json_response
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

HEALTH_PATHS = "/v1/health/"
"""They need no token."""


def health_routes(problem: Callable[[], Awaitable[str]]) -> list[Route]:
    """Return the routes below HEALTH_PATHS: `live`, and `ready`, which is 503 while there is a problem.

    `problem`: returns why it is not ready, in words that anybody may read; empty if it is.
    """

    async def live(_: Request) -> Response:
        return json_response({"live": True})

    async def ready(_: Request) -> Response:
        if why := await problem():
            return json_response({"ready": False, "error": why}, 503)
        return json_response({"ready": True})

    return [Route(f"{HEALTH_PATHS}live", live), Route(f"{HEALTH_PATHS}ready", ready)]


async def redis_problem(client: Redis) -> str:
    """Return that Redis is unavailable, without its address; empty if it answers."""
    try:
        with unavailable_if_lost(client):
            await client.ping()
    except RegistryUnavailableError:
        return "Redis is unavailable"
    return ""
