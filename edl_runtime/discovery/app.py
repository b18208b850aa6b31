"""The HTTP routes of a discovery endpoint, and the stream of assignments that a student keeps open."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edl_runtime.concurrency import first_completed
from edl_runtime.discovery.assignments import REPORT_EVERY_S, StudentRegistry, StudentSession
from edl_runtime.discovery.errors import PoolLimitError
from edl_runtime.errors import EdlError, SpecError
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.pool_reports import StudentReport
from edl_runtime.protocol.asgi_server import (
    BearerAuth,
    http_error_response,
    json_response,
    read_body,
    wait_disconnected,
)
from edl_runtime.registry.errors import UnknownPoolError
from edl_runtime.registry.health import HEALTH_PATHS, health_routes, redis_problem
from edl_runtime.registry.members import Member
from edl_runtime.registry.pools import get_pool, list_pools
from edl_runtime.specs import check_name
from edl_runtime.store.errors import RegistryUnavailableError

if TYPE_CHECKING:
    from redis.asyncio import Redis

CLOSE_WITHIN_S = 1.0
"""Longest time to send the end of a stream; the client may not be reading."""

log = get_logger(__name__)


class AssignmentStream:
    """The ASGI application of `GET /v1/pools/{pool}/students/{student}?want=N&address=A`.

    The open stream is the student's registration. Lines are `Assignment`s in JSON. It ends with the connection, when
    the student sends no status, when another stream has the same id, and when the endpoint stops.

    Raises SpecError, HTTPException and RegistryUnavailableError before the first line.
    """

    def __init__(self, registry: StudentRegistry) -> None:
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET":  # where GET is allowed, Starlette lets HEAD through
            raise HTTPException(405, "only GET is allowed", {"Allow": "GET"})
        pool, student = _parse_request(Request(scope))
        async with self._registry.connect(pool, student) as session:
            log.info("student.connected", pool=pool, student=student.id)
            headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            reason = await first_completed(
                _send_assignments(session, send), session.wait_until_closed(), _disconnect(receive)
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_WITHIN_S):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        log.info("student.disconnected", pool=pool, student=student.id, reason=reason)


class _StudentQuery(msgspec.Struct):
    """Id, address and want are as of a `Member`."""

    student: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,200}\Z")]
    address: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{0,200}\Z")] = ""
    want: Annotated[int, msgspec.Meta(ge=1, lt=1_000_000_000)] | None = None


def _parse_request(request: Request) -> tuple[str, Member]:
    pool = check_name("pool", request.path_params["pool"])
    try:
        query = msgspec.convert({**request.query_params, **request.path_params}, _StudentQuery, strict=False)
    except msgspec.ValidationError as error:
        raise HTTPException(400, str(error)) from None
    return pool, Member(id=query.student, address=query.address, want=query.want)


async def _send_assignments(session: StudentSession, send: Send) -> str:
    async for assignment in session.assignments():
        line = msgspec.json.encode(assignment) + b"\n"
        await send({"type": "http.response.body", "body": line, "more_body": True})
    raise AssertionError


async def _disconnect(receive: Receive) -> str:
    await wait_disconnected(receive)
    return "it disconnected"


# The endpoint's routes.

STATUS_LIMIT = 64 * 1024
"""Most bytes of a student's report."""
STATUS_WITHIN_S = REPORT_EVERY_S
"""Longest time to receive it."""

_STATUS_CODES: dict[type[EdlError], int] = {
    SpecError: 400,
    UnknownPoolError: 404,
    PoolLimitError: 503,
    RegistryUnavailableError: 503,
}


def build_app(registry: StudentRegistry, client: Redis, namespace: str, *, token: str) -> ASGIApp:
    """Return the ASGI application; all routes but health require `token`, unless that is empty."""
    routes = _Routes(registry, client, namespace)
    return Starlette(
        routes=[
            *health_routes(partial(redis_problem, client)),
            Route("/v1/pools", routes.pools),
            Route("/v1/pools/{pool}", routes.pool),
            Route("/v1/pools/{pool}/students/{student}", AssignmentStream(registry), methods=["GET"]),
            Route("/v1/pools/{pool}/students/{student}/status", routes.status, methods=["PUT"]),
        ],
        middleware=[Middleware(BearerAuth, token=token, variable="EDL_DISCOVERY_TOKEN", open_paths=(HEALTH_PATHS,))],
        exception_handlers={HTTPException: http_error_response, **dict.fromkeys(_STATUS_CODES, _error_response)},
    )


class _Routes:
    def __init__(self, registry: StudentRegistry, client: Redis, namespace: str) -> None:
        self._registry = registry
        self._client = client
        self._namespace = namespace

    async def pools(self, _: Request) -> Response:
        return json_response(await list_pools(self._client, self._namespace))

    async def pool(self, request: Request) -> Response:
        name = check_name("pool", request.path_params["pool"])
        return json_response(await get_pool(self._client, self._namespace, name))

    async def status(self, request: Request) -> Response:
        pool, student = request.path_params["pool"], request.path_params["student"]
        if not self._registry.update(pool, student, await _read_report(request)):
            raise HTTPException(
                404, f"no student {student!r} of pool {pool!r} is connected here; open its stream first"
            )
        return Response(status_code=204)


_report_decoder = JsonDecoder(StudentReport)


async def _read_report(request: Request) -> StudentReport:
    body = await read_body(request, limit=STATUS_LIMIT, within_s=STATUS_WITHIN_S)
    try:
        return _report_decoder.decode(body)
    except msgspec.DecodeError as error:
        raise HTTPException(400, str(error)) from None


async def _error_response(_: Request, error: Exception) -> Response:
    status = next(status for kind, status in _STATUS_CODES.items() if isinstance(error, kind))
    return json_response({"error": str(error)}, status)
