"""Requests to a discovery endpoint, and the one place that turns their failures into this project's errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from edl_runtime.decoding import Decoder
from edl_runtime.discovery.messages import SILENT_AFTER_S
from edl_runtime.errors import DiscoveryRefusedError, DiscoverySilentError, DiscoveryUnavailableError, SpecError
from edl_runtime.registry.pools import PoolView
from edl_runtime.specs import check_name

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

CONNECT_WITHIN_S = 2.0
_REASON_LIMIT = 16 * 1024


class Link:
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

    async def pools(self) -> list[PoolView]:
        """Return all pools that have members, by name. Raises as `ask` does."""
        return await self._read("/v1/pools", list[PoolView])

    async def pool(self, name: str) -> PoolView:
        """Return that pool. Raises as `ask` does; without members it is refused."""
        return await self._read(f"/v1/pools/{check_name('pool', name)}", PoolView)

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
        with self._unavailable_if_lost():
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
            return Decoder(kind).decode(content)
        except msgspec.DecodeError as error:
            raise DiscoveryRefusedError(self.url, response.status_code, f"no pools: {error}") from None

    @contextmanager
    def _unavailable_if_lost(self) -> Iterator[None]:
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


_refusal_decoder = Decoder(_Refusal)


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
