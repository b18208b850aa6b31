"""Requests to teachers over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

import msgspec

from edl_runtime.concurrency import paused
from edl_runtime.errors import clipped
from edl_runtime.gateway.errors import RequestRefusedError, TeacherFailedError
from edl_runtime.gateway.requests import Question
from edl_runtime.gateway.teachers import LlmTeacher
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.asgi_server import CHUNKS_A_TURN
from edl_runtime.protocol.errors import MOST_TOLD
from edl_runtime.protocol.tls import client_trust
from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    import httpx

CONNECT_WITHIN_S = 5.0
SILENT_AFTER_S = 600.0
"""A teacher sends nothing while it computes; a part that takes longer is asked of another one."""
BODY_WITHIN_S = 120.0
"""It sends an answer in one go, once it has begun to."""
KEPT_S = 2.0
"""How long connections are kept; servers close theirs after 5 s."""
MOST_CONNECTIONS = 1000
REASON_LIMIT = 64 * 1024

_REFUSALS = frozenset({400, 405, 413, 415, 422})
"""Answers that every teacher of the pool would give. A 404 is none: this one may serve another model now."""


Hold = Callable[[int], Awaitable[None]]


async def _hold_nothing(size: int) -> None:
    """Hold nothing for so many bytes: they are few."""


class TeacherClient:
    """Asks teachers. A context manager."""

    def __init__(self, settings: RuntimeSettings) -> None:
        """Raise SpecError for certificates that can't be read."""
        self._trust = client_trust(settings)
        token = settings.teacher_token
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        self._transports: dict[bool, httpx.AsyncHTTPTransport] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for transport in self._transports.values():
            await transport.aclose()

    async def get(self, teacher: LlmTeacher, path: str) -> bytes:
        """Return what is at a path. Raises as `ask`."""
        async with self._exchange("GET", teacher, Question(path, b"", 1 << 22)) as response:
            return await self._read(teacher, response, 1 << 22)

    async def ask(self, teacher: LlmTeacher, question: Question, hold: Hold = _hold_nothing) -> bytes:
        """Return a teacher's answer; `hold` is awaited for the number of bytes of each piece, before it is kept.

        Raises RequestRefusedError for what it refuses as every teacher would, TeacherFailedError for all else.
        """
        async with self._exchange("POST", teacher, question) as response:
            return await self._read(teacher, response, question.answer_limit, hold)

    @asynccontextmanager
    async def stream(self, teacher: LlmTeacher, question: Question) -> AsyncIterator[httpx.Response]:
        """Yield a teacher's answer, its body unread. Raises as `ask`, also in the block."""
        async with self._exchange("POST", teacher, question) as response:
            yield response

    @asynccontextmanager
    async def _exchange(self, method: str, teacher: LlmTeacher, question: Question) -> AsyncIterator[httpx.Response]:
        import httpx

        times = httpx.Timeout(SILENT_AFTER_S, connect=CONNECT_WITHIN_S)
        extensions: dict[str, Any] = {"timeout": times.as_dict()}
        if self._trust and self._trust.name:
            extensions["sni_hostname"] = self._trust.name
        url = teacher.url + question.path
        is_tls = url.startswith("https:")
        if self._trust and not is_tls:
            reason = "EDL_TEACHER_CA is set, and its address has no TLS: register it as https, or unset the variable"
            raise TeacherFailedError(teacher.address, reason, unreached=True)
        request = httpx.Request(method, url, content=question.body, headers=self._headers, extensions=extensions)
        try:
            response = await self._transport(is_tls=is_tls).handle_async_request(request)
            try:
                if response.status_code != 200:
                    raise await self._failure(teacher, response)
                yield response
            finally:
                await response.aclose()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise TeacherFailedError(teacher.address, _named(error), unreached=True) from None
        except (httpx.TransportError, OSError) as error:
            raise TeacherFailedError(teacher.address, _named(error)) from None

    def _transport(self, *, is_tls: bool) -> httpx.AsyncHTTPTransport:
        """Return the transport with TLS or without: certificates are slow to load, and most need none."""
        import httpx

        if is_tls not in self._transports:
            verify = self._trust.context if self._trust else True
            limits = httpx.Limits(max_connections=MOST_CONNECTIONS, keepalive_expiry=KEPT_S)
            self._transports[is_tls] = httpx.AsyncHTTPTransport(verify=verify if is_tls else False, limits=limits)
        return self._transports[is_tls]

    async def _read(
        self, teacher: LlmTeacher, response: httpx.Response, limit: int, hold: Hold = _hold_nothing
    ) -> bytes:
        content = bytearray()
        try:
            async with asyncio.timeout(BODY_WITHIN_S) as within:
                async for chunk in _pieces(response):
                    if len(content) + len(chunk) > limit:
                        reason = f"its answer has more than {limit} bytes"
                        raise TeacherFailedError(teacher.address, reason, answered=True)
                    with paused(within):
                        await hold(len(chunk))
                    content += chunk
        except TimeoutError:
            reason = f"its answer did not end within {BODY_WITHIN_S:.0f} s of its begin"
            raise TeacherFailedError(teacher.address, reason, answered=True) from None
        return bytes(content)

    async def _failure(self, teacher: LlmTeacher, response: httpx.Response) -> Exception:
        body = bytearray()
        async for chunk in _pieces(response):
            body += chunk
            if len(body) > REASON_LIMIT:
                break
        status = response.status_code
        reason = f"it answered {status}: {_reason(bytes(body))}"
        if status in _REFUSALS:
            return RequestRefusedError(f"teacher {teacher.address} refuses it: {reason}")
        return TeacherFailedError(teacher.address, reason, answered=True)


async def _pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield a body as it comes; of what has come already, others have a turn every few chunks, which may be small."""
    chunks = 0
    async for chunk in response.aiter_raw():
        yield chunk
        chunks += 1
        if chunks % CHUNKS_A_TURN == 0:
            await asyncio.sleep(0)


def _named(error: Exception) -> str:
    return str(error) or type(error).__name__


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    """An error as vLLM and SGLang answer it, of several versions."""

    error: _Error | str | None = None
    message: str = ""
    detail: Any = None


_refusal_decoder = JsonDecoder(_Refusal)


def _reason(body: bytes) -> str:
    """Return the words of a refusal."""
    try:
        found = _refusal_decoder.decode(body)
    except msgspec.DecodeError:
        return clipped(body.decode("utf-8", "replace"), MOST_TOLD)
    inner = found.error.message if isinstance(found.error, _Error) else found.error
    return clipped(inner or found.message or str(found.detail or "no reason given"), MOST_TOLD)
