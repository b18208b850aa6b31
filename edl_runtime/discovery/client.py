"""The client of a discovery endpoint: lists pools, and follows a student's assignments."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from edl_runtime.concurrency import first_completed
from edl_runtime.discovery.assignments import REPORT_EVERY_S, SILENT_AFTER_S, Assignment
from edl_runtime.discovery.errors import DiscoveryNotReadyError, DiscoveryRefusedError, DiscoveryUnavailableError
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.pool_reports import StudentReport
from edl_runtime.protocol.address import check_http_url
from edl_runtime.registry.directory import SETTLE_S
from edl_runtime.registry.members import Member
from edl_runtime.registry.pools import PoolInfo
from edl_runtime.specs import check_name

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

CONNECT_WITHIN_S = 2.0
ANSWER_WITHIN_S = 30.0
"""Longest time for the head of an answer, or for a body that ends; bytes may come one at a time."""
ANSWER_LIMIT = 64 << 20
"""Bytes of a body: of pools with some 100,000 members."""
_REASON_LIMIT = 16 * 1024


class DiscoveryClient:
    """A client of one endpoint, with persistent connections. A context manager.

    Raises SpecError for a `url` that is not http or https, or that has a user, a password or a query in it.
    """

    def __init__(self, url: str, token: str) -> None:
        import httpx

        self.url = check_http_url(url, _NAME)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Not httpx.AsyncClient, which logs each request, about one a second. Only https needs the certificates, which
        # are slow to load.
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
        """Return that pool. Raises as `ask` does; a pool without members is a DiscoveryRefusedError."""
        return await self._read(f"/v1/pools/{check_name('pool', name)}", PoolInfo)

    @asynccontextmanager
    async def ask(
        self, method: str, path: str, *, params: dict[str, Any] | None = None, content: bytes = b""
    ) -> AsyncIterator[httpx.Response]:
        """Yield the successful response, its body unread.

        Raises DiscoveryUnavailableError, also in the block when the connection is lost or idle for `SILENT_AFTER_S`,
        and DiscoveryRefusedError.
        """
        import httpx

        request = httpx.Request(
            method, self.url + path, params=params, content=content, headers=self._headers, extensions=self._extensions
        )
        with self._translate_errors():
            async with asyncio.timeout(ANSWER_WITHIN_S):
                response = await self._transport.handle_async_request(request)
            try:
                if not response.is_success:
                    async with asyncio.timeout(ANSWER_WITHIN_S):
                        raise await self._refusal(response)
                yield response
            finally:
                await response.aclose()

    async def _read(self, path: str, kind: type[T]) -> T:
        async with self.ask("GET", path) as response:
            content = bytearray()
            async with asyncio.timeout(ANSWER_WITHIN_S):
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > ANSWER_LIMIT:
                        cause = f"its answer has more than {ANSWER_LIMIT} bytes"
                        raise DiscoveryRefusedError(self.url, response.status_code, cause)
        try:
            return JsonDecoder(kind).decode(content)
        except msgspec.DecodeError as error:
            raise DiscoveryRefusedError(self.url, response.status_code, f"its answer can't be read: {error}") from None

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except (httpx.TimeoutException, TimeoutError):
            raise DiscoveryNotReadyError(self.url, "no answer in time") from None
        except DiscoveryUnavailableError:  # an OSError, too
            raise
        except (httpx.TransportError, OSError) as error:
            raise DiscoveryUnavailableError(self.url, str(error) or type(error).__name__) from None

    async def _refusal(self, response: httpx.Response) -> Exception:
        """Return the error for an answer; only a 5xx is worth a retry."""
        body = b""
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > _REASON_LIMIT:
                break
        try:
            reason = _refusal_decoder.decode(body).error
        except msgspec.DecodeError:
            reason = "it is not a discovery endpoint"
        if response.is_server_error:
            return DiscoveryNotReadyError(self.url, f"it answered {response.status_code}: {reason}")
        return DiscoveryRefusedError(self.url, response.status_code, reason)


class _Refusal(msgspec.Struct):
    error: str


_refusal_decoder = JsonDecoder(_Refusal)
_NAME = "settings.discovery_url (EDL_DISCOVERY_URL)"


# A student behind a discovery endpoint.

SHORTEST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Between attempts to reconnect; doubles each time, with jitter."""

LINE_LIMIT = 1 << 20
"""Bytes of an assignment: tens of thousands of teachers."""

log = get_logger(__name__)

_assignment_decoder = JsonDecoder(Assignment)


async def follow_assignments(
    client: DiscoveryClient,
    pool: str,
    me: Member,
    use: Callable[[Assignment], None],
    make_report: Callable[[], StudentReport],
) -> None:
    """Register as that student of the pool and call `use` with each assignment, changed or not, until cancelled.

    Sends what `make_report` returns about once a second. Reconnects for ever to an endpoint that is lost. After that an
    assignment without teachers is ignored for `SETTLE_S`: Redis may have been emptied.

    Raises DiscoveryUnavailableError and DiscoveryRefusedError when the first connection fails.
    """
    path = f"/v1/pools/{pool}/students/{me.id}"
    async with aclosing(_assignments(client, path, me)) as assignments:
        use(await anext(assignments))
        # only a connected student may send reports
        await first_completed(_use_each(assignments, use), _send_reports(client, path, make_report))


async def _use_each(assignments: AsyncIterable[Assignment], use: Callable[[Assignment], None]) -> None:
    async for assignment in assignments:
        use(assignment)


async def _assignments(client: DiscoveryClient, path: str, me: Member) -> AsyncGenerator[Assignment, None]:
    loop = asyncio.get_running_loop()
    known = away = False
    back_at = -math.inf
    pause_s = SHORTEST_PAUSE_S
    while True:
        cause = "it ended the stream"
        try:
            async with aclosing(_read_stream(client, path, me)) as lines:
                async for assignment in lines:
                    if away:
                        back_at = loop.time()
                        log.info("discovery.recovered", url=client.url)
                    known, away, pause_s = True, False, SHORTEST_PAUSE_S
                    if assignment.teachers or loop.time() > back_at + SETTLE_S:
                        yield assignment
        except (DiscoveryUnavailableError, DiscoveryRefusedError) as error:
            if not known:
                raise
            cause = error.cause
        if not away:
            log.warning("discovery.unavailable", url=client.url, cause=cause)
        away = True
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _read_stream(client: DiscoveryClient, path: str, me: Member) -> AsyncGenerator[Assignment, None]:
    params = {"address": me.address, **({} if me.want is None else {"want": me.want})}
    async with client.ask("GET", path, params=params) as response:
        try:
            async for line in _lines(response.aiter_raw()):
                yield _assignment_decoder.decode(line)
        except msgspec.DecodeError as error:
            raise DiscoveryRefusedError(
                client.url, response.status_code, f"its answer can't be read: {error}"
            ) from None


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > LINE_LIMIT:
            raise msgspec.DecodeError(f"a line of more than {LINE_LIMIT} bytes")


async def _send_reports(client: DiscoveryClient, path: str, make_report: Callable[[], StudentReport]) -> None:
    while True:
        report = msgspec.json.encode(make_report())
        with suppress(DiscoveryUnavailableError, DiscoveryRefusedError):  # the stream reports it
            async with client.ask("PUT", f"{path}/status", content=report):
                pass
        await asyncio.sleep(REPORT_EVERY_S)
