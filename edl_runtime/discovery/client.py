"""The client of a discovery endpoint: lists pools, and follows a student's assignments."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from edl_runtime.concurrency import first_completed
from edl_runtime.discovery.assignments import REPORT_EVERY_S, SILENT_AFTER_S, Assignment, StudentStatus
from edl_runtime.discovery.errors import DiscoveryRefusedError, DiscoverySilentError, DiscoveryUnavailableError
from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.registry.directory import SETTLE_S
from edl_runtime.registry.members import Member
from edl_runtime.registry.pools import PoolInfo
from edl_runtime.specs import check_name

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

CONNECT_WITHIN_S = 2.0
_REASON_LIMIT = 16 * 1024


class DiscoveryClient:
    """The way to one endpoint: connections are kept and used again. A context manager.

    Raises SpecError for a `url` that is none of http or https, or that has a user, a password or a query in it.
    """

    def __init__(self, url: str, token: str) -> None:
        import httpx

        self.url = _checked(url)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Not httpx.AsyncClient, which writes a line into the user's log for each request, and there is one a second.
        # Certificates to trust take a while to load, and http has none.
        self._transport = httpx.AsyncHTTPTransport(verify=self.url.startswith("https:"))
        times = httpx.Timeout(SILENT_AFTER_S, connect=CONNECT_WITHIN_S)
        self._extensions = {"timeout": times.as_dict()}

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._transport.aclose()

    async def pools(self) -> list[PoolInfo]:
        """Return all pools that have members, by name. Raises as `ask` does."""
        return await self._read("/v1/pools", list[PoolInfo])

    async def pool(self, name: str) -> PoolInfo:
        """Return that pool. Raises as `ask` does; without members it is refused."""
        return await self._read(f"/v1/pools/{check_name('pool', name)}", PoolInfo)

    @asynccontextmanager
    async def ask(
        self, method: str, path: str, *, params: dict[str, Any] | None = None, content: bytes = b""
    ) -> AsyncIterator[httpx.Response]:
        """Give the answer, its body unread, if the endpoint agrees.

        Raises DiscoveryUnavailableError, also in the block when the connection is lost or silent for `SILENT_AFTER_S`,
        and DiscoveryRefusedError.
        """
        import httpx

        request = httpx.Request(
            method, self.url + path, params=params, content=content, headers=self._headers, extensions=self._extensions
        )
        with self._translate_errors():
            response = await self._transport.handle_async_request(request)
            try:
                if not response.is_success:
                    raise await self._refusal(response)
                yield response
            finally:
                await response.aclose()

    async def _read(self, path: str, kind: type[T]) -> T:
        async with self.ask("GET", path) as response:
            content = await response.aread()
        try:
            return JsonDecoder(kind).decode(content)
        except msgspec.DecodeError as error:
            raise DiscoveryRefusedError(self.url, response.status_code, f"no pools: {error}") from None

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.TimeoutException:
            raise DiscoverySilentError(self.url, "it is silent") from None
        except (httpx.TransportError, OSError) as error:
            raise DiscoveryUnavailableError(self.url, str(error) or type(error).__name__) from None

    async def _refusal(self, response: httpx.Response) -> Exception:
        """Return the error that an answer is; only a server in trouble may answer otherwise later."""
        reason = await _reason(response)
        if response.is_server_error:
            return DiscoveryUnavailableError(self.url, f"it answered {response.status_code}: {reason}")
        return DiscoveryRefusedError(self.url, response.status_code, reason)


async def _reason(response: httpx.Response) -> str:
    body = b""
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > _REASON_LIMIT:
            break
    try:
        return _refusal_decoder.decode(body).error
    except msgspec.DecodeError:
        return "it is no discovery endpoint of ours"


class _Refusal(msgspec.Struct):
    error: str


_refusal_decoder = JsonDecoder(_Refusal)


_NAME = "settings.discovery_url (EDL_DISCOVERY_URL)"


def _checked(url: str) -> str:
    allowed = "http:// or https:// with host and port, as in https://edl.example:8443; the token has its own variable"
    try:
        parts = urlsplit(url)
        safe = f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
    except ValueError:  # half an IPv6 address, or a port that is no number
        raise SpecError(_NAME, "no URL", allowed) from None
    if not parts.scheme or not parts.hostname:  # and nobody knows what is a secret in it
        raise SpecError(_NAME, "a URL without a host" if parts.scheme else "a URL without http:// or https://", allowed)
    if parts.scheme not in ("http", "https") or parts.username or parts.password or parts.query:
        raise SpecError(_NAME, safe, allowed)
    return url.rstrip("/")


# A student behind a discovery endpoint.

SHORTEST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Between attempts to come back; each is up to twice as long as the one before, by chance."""

LINE_LIMIT = 1 << 20
"""Bytes of an assignment: tens of thousands of teachers."""

log = get_logger(__name__)

_assignment_decoder = JsonDecoder(Assignment)


async def follow_assignments(
    link: DiscoveryClient,
    pool: str,
    me: Member,
    use: Callable[[Assignment], None],
    say: Callable[[], StudentStatus],
) -> None:
    """Be that student of the pool and call `use` with each assignment, changed or not, until cancelled.

    What `say` returns is told about once a second. An endpoint that is lost is tried again for ever. When it comes back
    without teachers, that is believed after `SETTLE_S` only: its Redis may have been emptied.

    Raises DiscoveryUnavailableError and DiscoveryRefusedError when the first attempt to reach it fails.
    """
    path = f"/v1/pools/{pool}/students/{me.id}"
    async with aclosing(_assignments(link, path, me)) as assignments:
        use(await anext(assignments))
        await first_completed(
            _use_each(assignments, use), _report_status(link, path, say)
        )  # which only who is connected may


async def _use_each(assignments: AsyncIterable[Assignment], use: Callable[[Assignment], None]) -> None:
    async for assignment in assignments:
        use(assignment)


async def _assignments(link: DiscoveryClient, path: str, me: Member) -> AsyncGenerator[Assignment, None]:
    loop = asyncio.get_running_loop()
    known = away = False
    back_at = -math.inf
    pause_s = SHORTEST_PAUSE_S
    while True:
        cause = "it ended the stream"
        try:
            async with aclosing(_read_stream(link, path, me)) as lines:
                async for assignment in lines:
                    if away:
                        back_at = loop.time()
                        log.info("discovery.back", url=link.url)
                    known, away, pause_s = True, False, SHORTEST_PAUSE_S
                    if assignment.teachers or loop.time() > back_at + SETTLE_S:
                        yield assignment
        except (DiscoveryUnavailableError, DiscoveryRefusedError) as error:
            if not known:
                raise
            cause = error.cause
        if not away:
            log.warning("discovery.away", url=link.url, cause=cause)
        away = True
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - to come apart, not to hide
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _read_stream(link: DiscoveryClient, path: str, me: Member) -> AsyncGenerator[Assignment, None]:
    params = {"address": me.address, **({} if me.want is None else {"want": me.want})}
    async with link.ask("GET", path, params=params) as response:
        try:
            async for line in _lines(response.aiter_raw()):
                yield _assignment_decoder.decode(line)
        except msgspec.DecodeError as error:
            raise DiscoveryRefusedError(link.url, response.status_code, f"no assignment: {error}") from None


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > LINE_LIMIT:
            raise msgspec.DecodeError(f"a line of {LINE_LIMIT} bytes or more")


async def _report_status(link: DiscoveryClient, path: str, say: Callable[[], StudentStatus]) -> None:
    while True:
        words = msgspec.json.encode(say())
        with suppress(DiscoveryUnavailableError, DiscoveryRefusedError):  # the stream tells
            async with link.ask("PUT", f"{path}/status", content=words):
                pass
        await asyncio.sleep(REPORT_EVERY_S)
