"""The HTTP server of a controller: its health for the kubelet, and its metrics for Prometheus."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edl_runtime.controller.vitals import Vitals, clock
from edl_runtime.errors import SpecError
from edl_runtime.protocol.address import check_exposure
from edl_runtime.protocol.asgi_server import BearerAuth, http_error_response, open_listener, serving
from edl_runtime.registry.health import HEALTH_PATHS, health_routes, redis_problem
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect
from edl_runtime.teacher.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from starlette.types import ASGIApp

CONNECTIONS = 64
TOKEN = "EDL_MONITOR_TOKEN"  # noqa: S105 - the variable


@asynccontextmanager
async def serving_vitals(host: str, port: int, vitals: Vitals, settings: RuntimeSettings) -> AsyncIterator[str]:
    """Serve health and metrics during the block, whose value is the URL. Raises SpecError if it can't listen."""
    try:
        listener = open_listener(host, port)
    except OSError as error:
        raise SpecError(
            "--port", f"{host}:{port}", f"an address that can be bound ({error.strerror or error})"
        ) from None
    async with connect(settings.redis_url) as client:
        app = build_app(vitals, client, token=settings.monitor_token, has_metrics=_may_tell(host, settings))
        async with serving(app, listener, connections=CONNECTIONS) as url:
            yield url


def _may_tell(host: str, settings: RuntimeSettings) -> bool:
    """Whether metrics are served: where other machines can't ask, or have to send the token."""
    try:
        check_exposure(host, settings.monitor_token, TOKEN)
    except SpecError:
        return False
    return True


def build_app(vitals: Vitals, client: Redis, *, token: str, has_metrics: bool) -> ASGIApp:
    """Return the ASGI application. Health needs no token; metrics do, unless it is empty."""

    async def problem() -> str:
        return vitals.problem(clock()) or await redis_problem(client)

    async def metrics(_: Request) -> Response:
        return Response(vitals.render(), media_type=CONTENT_TYPE)

    return Starlette(
        routes=[*health_routes(problem), *([Route("/metrics", metrics)] if has_metrics else [])],
        middleware=[Middleware(BearerAuth, token=token, variable=TOKEN, open_paths=(HEALTH_PATHS,))],
        exception_handlers={HTTPException: http_error_response},
    )
