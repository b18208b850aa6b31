"""The server of the discovery endpoint."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from edl_runtime.discovery.app import AUTHENTICATED, build_app
from edl_runtime.discovery.assignments import StudentRegistry
from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger
from edl_runtime.protocol.address import check_exposure
from edl_runtime.protocol.listener import ConnectionTable, accepting, connection_limit, listen
from edl_runtime.protocol.tls import server_tls_context
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import RegistryError
from edl_runtime.store.redis_client import connect

CONNECTION_LIMIT = 2500
"""Each student uses two."""
REDIS_LIMIT = 500
"""Connections to Redis."""
POOL_LIMIT = 200
"""Each pool uses two connections to Redis; the others renew leases."""
IDLE_CHECK_S = 5.0
"""How often connections are checked; those without a request since the last check are closed."""
OTHER_FILES = 256
"""Descriptors that are neither students' nor Redis's."""
TCP_TIMEOUT_S = 10.0
"""After so long a connection is dropped whose client does not read."""
SHUTDOWN_TIMEOUT_S = 3.0
"""Longest time to finish open requests."""

log = get_logger(__name__)


async def serve(host: str, port: int, settings: RuntimeSettings, on_ready: Callable[[str], None]) -> None:
    """Serve the registry of `settings` until SIGTERM or SIGINT: then end the streams, leave their pools and return.

    `on_ready` is called with the URL once connections are accepted, even while Redis is unavailable: requests that need
    it are answered 503.

    Raises SpecError for wrong settings, RegistryError when it can't listen.
    """
    check_exposure(host, settings.discovery_token, "EDL_DISCOVERY_TOKEN")
    if not settings.redis_url:
        raise SpecError("EDL_REDIS_URL", "", "the Redis that pools register in, as in redis://127.0.0.1:6379/0")
    shown = server_tls_context(settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    most = connection_limit(CONNECTION_LIMIT, each=1, beside=REDIS_LIMIT + OTHER_FILES)
    connections: ConnectionTable[_Connection] = ConnectionTable(most)
    async with connect(settings.redis_url, connections=REDIS_LIMIT) as client:
        registry = StudentRegistry(client, settings.namespace, ttl_s=settings.lease_ttl_s, most_pools=POOL_LIMIT)
        app = build_app(registry, client, settings.namespace, token=settings.discovery_token)
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=round(SHUTDOWN_TIMEOUT_S),
        )
        config.load()
        server = _Server(config)

        def connection() -> _Connection:
            return _Connection(config, server.server_state, connections)

        listener = _listen(host, port)
        async with asyncio.TaskGroup() as tasks, accepting(listener, connections, connection, shown):
            tasks.create_task(server.serve(sockets=[]))  # `accepting` hands it the connections
            on_ready(_url(listener, "https" if shown else "http"))
            await stop.wait()
            registry.close()
            server.should_exit = True
    log.info("discovery.stopped")


class _Server(uvicorn.Server):
    """A server that does not handle signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """One of a limited number of connections. It is closed if the client sends no request for a while."""

    stalled_for = 0  # TCP_USER_TIMEOUT closes those that don't read

    def __init__(self, config: uvicorn.Config, state: ServerState, connections: ConnectionTable[_Connection]) -> None:
        super().__init__(config, state, {AUTHENTICATED: self._mark_authenticated})
        self._table = connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its parent's
        super().connection_made(transport)
        self._table.handshake_done(self)
        self._expect_request_soon((None, True))

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        super().connection_lost(exc)

    def _mark_authenticated(self) -> None:
        self._table.mark_used(self)

    @property
    def idle(self) -> bool:
        request: RequestResponseCycle | None = self.cycle
        return request is None or request.response_complete

    def abort(self) -> None:
        self.transport.abort()

    def _expect_request_soon(self, seen: tuple[object, bool]) -> None:
        self.loop.call_later(IDLE_CHECK_S, self._expect_request, seen)

    def _expect_request(self, seen: tuple[object, bool]) -> None:
        """Disconnect if the last request was already answered at the last check and no other has come since."""
        now = (self.cycle, self.idle)
        if self.idle and seen == now:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._expect_request_soon(now)


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = listen(host, port)
    except OSError as error:
        raise RegistryError(f"can't listen on {host} port {port}: {error.strerror or error}") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(TCP_TIMEOUT_S * 1000))
    return listener


def _url(listener: socket.socket, scheme: str) -> str:
    host, port, *_ = listener.getsockname()
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
