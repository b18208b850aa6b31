"""A student's stream: an answer that lasts as long as the student, with a line for each assignment."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from edl_runtime.discovery.hub import Connected, Hub
from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger
from edl_runtime.registry.members import Member
from edl_runtime.specs import check_name
from edl_runtime.waits import first

LAST_WORD_S = 1.0
"""How long the end of a stream may take to be sent to who may not be reading."""

_WORD = re.compile(r"[!-~]{1,200}")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")

log = get_logger(__name__)


class Stream:
    """The ASGI application of `GET /v1/pools/{pool}/students/{student}?want=N&address=A`.

    The open stream is the student's registration. Lines are `Assignment`s in JSON. It ends with the connection, when
    nothing is heard of the student, when another stream has the same id and when the endpoint stops.

    Raises SpecError and RegistryUnavailableError before it begins.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["method"] != "GET":  # where GET is allowed, Starlette lets HEAD through
            raise HTTPException(405, "a stream is for GET", {"Allow": "GET"})
        pool, student = _asked_for(Request(scope))
        async with self._hub.connect(pool, student) as connected:
            headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            why = await first(_push(connected, send), connected.over(), _disconnect(receive))
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        log.info("student.gone", pool=pool, student=student.id, why=why)


def student_id(text: str) -> str:
    """Return `text` if it can name a student, else raise SpecError."""
    if not _WORD.fullmatch(text):
        raise SpecError("student", text[:200], "1 to 200 printable ASCII characters without blanks")
    return text


def _asked_for(request: Request) -> tuple[str, Member]:
    wanted = request.query_params.get("want")
    if wanted is not None and not _NUMBER.fullmatch(wanted):
        raise SpecError("want", wanted[:200], "the most teachers that the student can use, or no such parameter")
    address = request.query_params.get("address", "")
    if address and not _WORD.fullmatch(address):
        raise SpecError("address", address[:200], "1 to 200 printable ASCII characters without blanks")
    student = Member(
        id=student_id(request.path_params["student"]), address=address, want=int(wanted) if wanted else None
    )
    return check_name("pool", request.path_params["pool"]), student


async def _push(connected: Connected, send: Send) -> str:
    async for assignment in connected.assignments():
        line = msgspec.json.encode(assignment) + b"\n"
        await send({"type": "http.response.body", "body": line, "more_body": True})
    raise AssertionError


async def _disconnect(receive: Receive) -> str:
    while (await receive())["type"] != "http.disconnect":
        pass
    return "it disconnected"
