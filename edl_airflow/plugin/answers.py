"""Answers of the page's API, with what goes wrong in words, and who is refused."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from airflow.sdk import conf
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError

from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.plugin import access
from edl_airflow.plugin.viewers import kept_of
from edl_airflow.plugin.views import plain_problem
from edl_runtime.errors import SpecError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
)

NO_CONNECTION = (
    "There is no such connection of type edl. Add one in Airflow, under Admin, Connections: edl_default is the one "
    "that tasks use unless they name another."
)


async def json_answer(request: Request, made: Callable[[], Any], *, at: float = 0.0) -> Response:
    """Answer with the JSON of what is `made`, in a thread; `at`: of when the data is, in Unix seconds."""
    etag, content = await asyncio.to_thread(lambda: encoded(made()))
    return answer_with(request, content, etag=etag, at=at)


def encoded(found: Any) -> tuple[str, bytes]:
    """Return an answer and its tag, which is the same while nothing but `at` has changed."""
    content = msgspec.json.encode(found)
    tagged = content
    if isinstance(found, dict) and "at" in found:
        tagged = content.replace(b'"at":' + msgspec.json.encode(found["at"]), b"", 1)
    return hashlib.blake2b(tagged, digest_size=12).hexdigest(), content


def answer_with(
    request: Request, content: bytes, *, etag: str = "", kind: str = "application/json", at: float = 0.0
) -> Response:
    """Answer with this content, or 304 to who has it; `etag`: its tag, else made of the content."""
    tag = f'"{etag or hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    headers = {"ETag": tag}
    if at:
        headers["X-EDL-At"] = f"{at:.3f}"
    # a proxy that compresses makes a tag weak
    if tag in [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


def error_answer(status: int, text: str) -> Response:
    """Answer with what is wrong, in words."""
    return Response(msgspec.json.encode({"error": text}), status, media_type="application/json")


async def denied(_: Request, __: Exception) -> Response:
    """Answer what a user may not see as what does not exist."""
    return error_answer(403, "It does not exist, or you have no permission for the DAG that it is of.")


async def no_connection(_: Request, __: Exception) -> Response:
    """Reveal nothing about connections of other types, not even that they exist."""
    return error_answer(404, NO_CONNECTION)


async def conflict(_: Request, error: Exception) -> Response:
    """Answer why it can't be done now."""
    return error_answer(409, str(error))


async def invalid(request: Request, error: Exception) -> Response:
    """Say what is wrong with a connection to those who may read it."""
    if isinstance(error, SpecError):
        if not error.field.startswith("connection"):
            return error_answer(422, str(error))
        conn_id = request.query_params.get("conn") or DEFAULT_CONN_ID
        may_read = await asyncio.to_thread(access.readable_connections, request.state.edl_user, [conn_id])
        is_own = error.field.startswith(f"connection {conn_id!r}")
        return error_answer(404, str(error)) if may_read and is_own else await no_connection(request, error)
    wrong = [str(each["loc"][-1]) for each in error.errors()] if isinstance(error, RequestValidationError) else []
    return error_answer(422, f"Not allowed: {', '.join(wrong)}.")


async def unavailable(request: Request, error: Exception) -> Response:
    """Name hosts only to those who may see the cluster's activity."""
    rights = await kept_of(request).rights.of(request.state.edl_user, (), "")
    return error_answer(503, str(error) if rights.cluster else plain_problem(error))


async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse every request of users who are not logged in, and answer whatever goes wrong, as in Airflow's database."""
    try:
        request.state.edl_user = await access.user_of(request)
        if request.state.edl_user is None:
            response: Response = error_answer(401, "Log in to Airflow first.")
        else:
            response = await call_next(request)
    except Exception as error:  # noqa: BLE001 - logged, but not for each poll
        kept_of(request).log(error, request.url.path)
        response = error_answer(503, f"Airflow can't answer now ({type(error).__name__}, see the API server's log).")
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "same-origin"
    # "Back" after a logout must not show what the former user saw; the page keeps the tags of its answers itself
    is_file = "/static/" in request.url.path
    response.headers["Cache-Control"] = "private, no-cache" if is_file else "no-store"
    return response


def forged(request: Request) -> str:
    """Return why a change is not from our page but perhaps from another site, by the user's cookie; else empty."""
    headers = request.headers
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return "Send JSON, with the header Content-Type: application/json."
    if headers.get("x-edl-request") != "1":
        return "Send the header X-EDL-Request: 1."
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return "Changes are allowed from this site's own page only."
    origin = headers.get("origin")
    configured = urlsplit(conf.get("api", "base_url", fallback="")).netloc
    own = {headers.get("host"), headers.get("x-forwarded-host"), configured} - {""}
    if origin is not None and "sec-fetch-site" not in headers and origin.partition("://")[2] not in own:
        return "Changes are allowed from this site's own page only."
    return ""
