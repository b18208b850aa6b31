"""The HTTP routes of a discovery endpoint, and the stream of assignments that a student keeps open."""

from __future__ import annotations

import asyncio
import hmac
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edl_runtime.concurrency import first_completed
from edl_runtime.discovery.assignments import REPORT_EVERY_S, StudentStatus
from edl_runtime.discovery.errors import PoolLimitError
from edl_runtime.discovery.sessions import StudentRegistry, StudentSession
from edl_runtime.errors import EdlError, SpecError
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.registry.errors import UnknownPoolError
from edl_runtime.registry.members import Member
from edl_runtime.registry.pools import get_pool, list_pools
from edl_runtime.specs import check_name
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

CLOSE_WITHIN_S = 1.0
"""How long the end of a stream may take to be sent to who may not be reading."""

_NAME = re.compile(r"[!-~]{1,200}")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")

log = get_logger(__name__)


class AssignmentStream:
    """The ASGI application of `GET /v1/pools/{pool}/students/{student}?want=N&address=A`.

    The open stream is the student's registration. Lines are `Assignment`s in JSON. It ends with the connection, when
    nothing is heard of the student, when another stream has the same id and when the endpoint stops.

    Raises SpecError and RegistryUnavailableError before it begins.
    """

    def __init__(self, registry: StudentRegistry) -> None:
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["method"] != "GET":  # where GET is allowed, Starlette lets HEAD through
            raise HTTPException(405, "a stream is for GET", {"Allow": "GET"})
        pool, student = _parse_request(Request(scope))
        async with self._registry.connect(pool, student) as connected:
            headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            why = await first_completed(
                _send_assignments(connected, send), connected.wait_until_closed(), _disconnect(receive)
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_WITHIN_S):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        log.info("student.gone", pool=pool, student=student.id, why=why)


def student_id(text: str) -> str:
    """Return `text` if it can name a student, else raise SpecError."""
    if not _NAME.fullmatch(text):
        raise SpecError("student", text[:200], "1 to 200 printable ASCII characters without blanks")
    return text


def _parse_request(request: Request) -> tuple[str, Member]:
    wanted = request.query_params.get("want")
    if wanted is not None and not _NUMBER.fullmatch(wanted):
        raise SpecError("want", wanted[:200], "the most teachers that the student can use, or no such parameter")
    address = request.query_params.get("address", "")
    if address and not _NAME.fullmatch(address):
        raise SpecError("address", address[:200], "1 to 200 printable ASCII characters without blanks")
    student = Member(
        id=student_id(request.path_params["student"]), address=address, want=int(wanted) if wanted else None
    )
    return check_name("pool", request.path_params["pool"]), student


async def _send_assignments(connected: StudentSession, send: Send) -> str:
    async for assignment in connected.assignments():
        line = msgspec.json.encode(assignment) + b"\n"
        await send({"type": "http.response.body", "body": line, "more_body": True})
    raise AssertionError


async def _disconnect(receive: Receive) -> str:
    while (await receive())["type"] != "http.disconnect":
        pass
    return "it disconnected"


# The endpoint's routes: who may ask what, and what is answered.

STATUS_LIMIT = 64 * 1024
"""Most bytes of what a student says at once."""
STATUS_WITHIN_S = REPORT_EVERY_S
"""How long a student may take to say it."""

AUTHENTICATED = "edl.welcome"
"""In a request's state: what to call when it has shown the token."""

_HEALTH_PATHS = "/v1/health/"
_STATUS_CODES: dict[type[EdlError], int] = {
    SpecError: 400,
    UnknownPoolError: 404,
    PoolLimitError: 503,
    RegistryUnavailableError: 503,
}


def build_app(registry: StudentRegistry, client: Redis, namespace: str, *, token: str) -> ASGIApp:
    """Return the ASGI application; all but health asks for `token`, unless that is empty."""
    routes = _Routes(registry, client, namespace)
    return Starlette(
        routes=[
            Route("/v1/health/live", routes.live),
            Route("/v1/health/ready", routes.ready),
            Route("/v1/pools", routes.pools),
            Route("/v1/pools/{pool}", routes.pool),
            Route("/v1/pools/{pool}/students/{student}", AssignmentStream(registry), methods=["GET"]),
            Route("/v1/pools/{pool}/students/{student}/status", routes.status, methods=["PUT"]),
        ],
        middleware=[Middleware(BearerAuth, token=token)],
        exception_handlers={HTTPException: _http_error_response, **dict.fromkeys(_STATUS_CODES, _error_response)},
    )


class BearerAuth:
    """Lets requests through that have the token, and those about health; tells the server whose client has it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._wanted = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        welcome = not self._wanted or hmac.compare_digest(given, self._wanted)
        if welcome and (tell := scope.get("state", {}).get(AUTHENTICATED)):
            tell()
        if welcome or scope["path"].startswith(_HEALTH_PATHS):
            await self._app(scope, receive, send)
            return
        refusal = _json(
            {"error": "the bearer token is missing or wrong; it is in EDL_DISCOVERY_TOKEN"},
            401,
            {"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)


class _Routes:
    def __init__(self, registry: StudentRegistry, client: Redis, namespace: str) -> None:
        self._registry = registry
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
        return _json(await list_pools(self._client, self._namespace))

    async def pool(self, request: Request) -> Response:
        name = check_name("pool", request.path_params["pool"])
        return _json(await get_pool(self._client, self._namespace, name))

    async def status(self, request: Request) -> Response:
        pool, student = check_name("pool", request.path_params["pool"]), student_id(request.path_params["student"])
        said = await _read_status(request)
        if not await self._registry.update(pool, student, said):
            raise HTTPException(
                404, f"no student {student!r} of pool {pool!r} is connected here; open its stream first"
            )
        return Response(status_code=204)


_status_decoder = JsonDecoder(StudentStatus)


async def _read_status(request: Request) -> StudentStatus:
    body = bytearray()
    try:
        async with asyncio.timeout(STATUS_WITHIN_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > STATUS_LIMIT:
                    raise HTTPException(413, f"{STATUS_LIMIT} bytes are allowed")
        return _status_decoder.decode(body)
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {STATUS_WITHIN_S:.0f} s") from None
    except msgspec.DecodeError as error:
        raise HTTPException(400, str(error)) from None


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


async def _http_error_response(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 -- registered for nothing else
    return _json({"error": error.detail}, error.status_code, dict(error.headers or {}))


async def _error_response(_: Request, error: Exception) -> Response:
    status = next(status for kind, status in _STATUS_CODES.items() if isinstance(error, kind))
    return _json({"error": str(error)}, status)
