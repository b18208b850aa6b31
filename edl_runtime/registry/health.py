"""The health routes of a server that works with the registry: it runs, and Redis can be reached."""

from __future__ import annotations

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


def health_routes(client: Redis) -> list[Route]:
    """Return the routes below HEALTH_PATHS: `live`, and `ready`, which is 503 while Redis is unavailable."""

    async def live(_: Request) -> Response:
        return json_response({"live": True})

    async def ready(_: Request) -> Response:
        try:
            with unavailable_if_lost(client):
                await client.ping()
        except RegistryUnavailableError:  # its address is not public
            return json_response({"ready": False, "error": "Redis is unavailable"}, 503)
        return json_response({"ready": True})

    return [Route(f"{HEALTH_PATHS}live", live), Route(f"{HEALTH_PATHS}ready", ready)]
