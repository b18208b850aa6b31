"""What our HTTP servers of JSON share: an ASGI application, a token, and a limited number of clients."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import h11
import msgspec
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from edl_runtime.concurrency import paused
from edl_runtime.protocol.address import has_token, is_meant_for_loopback, password_of
from edl_runtime.protocol.listener import MAX_NEW_CONNECTIONS, ConnectionTable, accepting, listen

IDLE_S = 30.0
"""After so long, and at most twice that, a connection without a request is closed.

Clients keep theirs for 5 s (httpx, vLLM's own server) to 15 s (aiohttp): one that is closed earlier than its client
expects meets a request that is on its way.
"""
TCP_TIMEOUT_S = 10.0
"""After so long a connection is dropped whose client does not read."""
SHUTDOWN_TIMEOUT_S = 3.0
"""Longest time to finish open requests, by default."""
CHUNKS_A_TURN = 32
"""Most chunks of one connection that are parsed in one turn of the event loop: each takes 8 us, however small it is."""
MOST_SMALL_CHUNKS = 10_000
"""After so many chunks a body is refused whose chunks are small on the average."""
SMALL_CHUNK = 64
"""A chunk of fewer bytes is small."""

_AUTHENTICATED = "edl.authenticated"
"""In a request's state: the function to call when its token is right."""


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host` and `port`, 0 for a free one, for `serving`. Raises OSError."""
    listener = listen(host, port)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(TCP_TIMEOUT_S * 1000))
    return listener


@asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    *,
    connections: int,
    tls: ssl.SSLContext | None = None,
    finish_s: float = SHUTDOWN_TIMEOUT_S,
) -> AsyncIterator[str]:
    """Serve `app` during the block, whose value is the URL; then finish open requests, and close the listener.

    `connections`: most at once, see `ConnectionTable`. `finish_s`: the longest time for open requests.
    """
    # a client that opens hundreds at once sends its requests afterwards; without TLS they take little memory
    most_new = MAX_NEW_CONNECTIONS if tls else connections
    table: ConnectionTable[_Connection] = ConnectionTable(connections, most_new)
    config = uvicorn.Config(
        _OneLength(app),
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(IDLE_S),
        timeout_graceful_shutdown=round(finish_s),
    )
    config.load()
    server = _Server(config)

    def connection() -> _Connection:
        return _Connection(config, server.server_state, table)

    async with asyncio.TaskGroup() as tasks, accepting(listener, table, connection, tls):
        tasks.create_task(server.serve(sockets=[]))  # `accepting` hands it the connections
        try:
            yield _url(listener, "https" if tls else "http")
        finally:
            server.should_exit = True


class _Server(uvicorn.Server):
    """A server that does not handle signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Parser(h11.Connection):
    """Parses what a client sends, `CHUNKS_A_TURN` at a time, and refuses bodies of small chunks."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self.refused = ""  # why
        self._left = 0
        self._chunks = 0  # of the request
        self._bytes = 0

    @property
    def is_cut(self) -> bool:
        """Whether it has parsed all that it may in one turn."""
        return not self._left

    def begin_turn(self) -> None:
        self._left = CHUNKS_A_TURN

    def next_event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        """Return the next event, or NEED_DATA when it has parsed all that it may. Raises RemoteProtocolError."""
        if self.is_cut:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._left -= 1
            self._chunks += event.chunk_end
            self._bytes += len(event.data)
            if self._chunks > MOST_SMALL_CHUNKS and self._bytes < self._chunks * SMALL_CHUNK:
                self.refused = (
                    f"the body's first {self._chunks} chunks have {self._bytes} bytes, "
                    f"allowed are {SMALL_CHUNK} or more in each on the average"
                )
                raise h11.RemoteProtocolError(self.refused)
        return event


class _Flow(FlowControl):
    """Lets the application resume reading only when all that was read has been parsed."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class _Connection(H11Protocol):
    """One of a limited number of connections. It is closed if the client sends no request for a while.

    What a client sends in small chunks is parsed a few at a time, so that others are served meanwhile.
    """

    conn: _Parser
    flow: _Flow

    stalled_for = 0  # TCP_USER_TIMEOUT closes those that don't read

    def __init__(self, config: uvicorn.Config, state: ServerState, connections: ConnectionTable[_Connection]) -> None:
        super().__init__(config, state, {_AUTHENTICATED: self._mark_authenticated})
        self.conn = _Parser()
        self._table = connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its parent's
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._table.handshake_done(self)
        self._expect_request_soon((None, True))

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        self.conn.begin_turn()
        super().handle_events()
        if self.conn.is_cut and not self.flow.is_held:
            self.flow.pause_reading()
            self.flow.is_held = True
            self.loop.call_soon(self._parse_on)

    def _parse_on(self) -> None:
        self.flow.is_held = False
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.handle_events()  # pauses it again

    def send_400_response(self, msg: str) -> None:
        """Refuse what can't be parsed; the application sees that the client has disconnected."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self.conn.refused or msg)
        else:  # an answer has begun
            self.transport.close()
        request: RequestResponseCycle | None = self.cycle
        if request is not None:
            request.disconnected = True
            request.message_event.set()

    def _mark_authenticated(self) -> None:
        self._table.mark_used(self)

    @property
    def idle(self) -> bool:
        request: RequestResponseCycle | None = self.cycle
        is_answered = request is None or request.response_complete
        return is_answered and not self.transport.get_write_buffer_size()  # what waits there is not sent

    def abort(self) -> None:
        self.transport.abort()

    def _expect_request_soon(self, seen: tuple[object, bool]) -> None:
        self.loop.call_later(IDLE_S, self._expect_request, seen)

    def _expect_request(self, seen: tuple[object, bool]) -> None:
        """Disconnect if the last request was already answered at the last check and no other has come since."""
        now = (self.cycle, self.idle)
        if self.idle and seen == now:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._expect_request_soon(now)


def _url(listener: socket.socket, scheme: str) -> str:
    host, port, *_ = listener.getsockname()
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _OneLength:
    """Refuses requests whose length a proxy may see otherwise than we: it may see another request behind them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = {b"content-length", b"transfer-encoding"}.intersection(name for name, _ in scope["headers"])
        reason = ""
        if len(told) > 1:
            reason = "it has both Content-Length and Transfer-Encoding, allowed is one of them"
        elif b"transfer-encoding" in told and scope["http_version"] == "1.0":
            reason = "it has Transfer-Encoding, which HTTP/1.0 does not know, allowed is Content-Length"
        if reason:
            await refusal(reason, 400, {"Connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return `content` as JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def refusal(reason: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return a refusal as JSON, `{"error": reason}`."""
    return json_response({"error": reason}, status, headers)


Refuse = Callable[[str, int, Mapping[str, str] | None], Response]
"""Makes the answer of a reason, a status and headers."""


class BearerAuth:
    """Requires the bearer token on all routes but those below `open_paths`. Put it around the application.

    Without a token, which is for loopback alone, it requires that a request's Host and Origin are loopback names, as
    those that a browser sends for another site's page are not. `variable`: where a refused client finds the token. With
    `as_password`, clients may send it as the password in a URL instead. `refuse`: makes the
    answer, as `refusal` does. Reports authenticated connections to the server.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        variable: str,
        open_paths: tuple[str, ...] = (),
        *,
        as_password: bool = False,
        refuse: Refuse = refusal,
    ) -> None:
        self._app = app
        self._token = token
        self._variable = variable
        self._open_paths = open_paths
        self._as_password = as_password
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["path"].startswith(self._open_paths)
        if not self._token and not is_open and not is_meant_for_loopback(scope["headers"]):
            answer = self._refuse(
                f"without a token in {self._variable}, Host and Origin have to be loopback names, as localhost",
                403,
                None,
            )
            await answer(scope, receive, send)
            return
        header = dict(scope["headers"]).get(b"authorization", b"")
        if self._as_password and (password := password_of(header)):
            header = b"Bearer " + password
        allowed = has_token(header, self._token)
        if allowed and (report := scope.get("state", {}).get(_AUTHENTICATED)):
            report()
        if allowed or is_open:
            await self._app(scope, receive, send)
            return
        reason = f"the bearer token is missing or wrong; it is in {self._variable}"
        await self._refuse(reason, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)


async def _hold_nothing(chunk: bytes) -> None:
    """Keep a piece of a body whose limit is room enough."""


async def read_body(
    request: Request, *, limit: int, within_s: float, hold: Callable[[bytes], Awaitable[None]] = _hold_nothing
) -> bytes:
    """Return a request's body.

    `hold` is awaited for each piece before it is kept; that takes none of the time. Raises what it does, and
    HTTPException for a body that is longer than `limit` bytes, late or broken off.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(within_s) as within:
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise HTTPException(413, f"at most {limit} bytes are allowed")
                with paused(within):
                    await hold(chunk)
                body += chunk
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {within_s:.0f} s") from None
    except ClientDisconnect:  # whoever sent it has ended; nobody reads this
        raise HTTPException(400, "the body was broken off") from None
    return bytes(body)


async def wait_disconnected(receive: Receive) -> None:
    """Wait until the client has hung up; its request's body has to be read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def http_error_response(_: Request, error: Exception, refuse: Refuse = refusal) -> Response:
    """Return an HTTPException as JSON; a handler for Starlette."""
    assert isinstance(error, HTTPException)  # noqa: S101 -- registered for nothing else
    return refuse(error.detail, error.status_code, error.headers)
