"""The server of a gateway."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from edl_runtime.concurrency import event_of_termination, first_completed
from edl_runtime.errors import SpecError
from edl_runtime.gateway.app import build_app
from edl_runtime.gateway.errors import GatewayError
from edl_runtime.gateway.gateway import POOL_LIMIT, Gateway
from edl_runtime.gateway.http import MOST_CONNECTIONS, TeacherClient
from edl_runtime.log import get_logger
from edl_runtime.protocol.address import check_exposure
from edl_runtime.protocol.asgi_server import open_listener, serving
from edl_runtime.protocol.listener import connection_limit
from edl_runtime.protocol.tls import server_tls_context
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

if TYPE_CHECKING:
    from starlette.types import ASGIApp

CONNECTION_LIMIT = 2500
FEWEST_CONNECTIONS = 100
REDIS_LIMIT = 3 * POOL_LIMIT
OTHER_FILES = 256
FINISH_S = 30.0
"""Longest time to answer open requests after SIGTERM."""

log = get_logger(__name__)


async def serve(
    host: str, port: int, settings: RuntimeSettings, on_ready: Callable[[str], None], *, wait_s: float
) -> None:
    """Serve the pools of the registry of `settings` until SIGTERM or SIGINT; then finish open requests and return.

    `on_ready` is called with the URL once connections are accepted. A request waits for `wait_s` while its pool has no
    good teacher. Raises SpecError for wrong settings, GatewayError when it can't listen.
    """
    check_exposure(host, settings.gateway_token, "EDL_GATEWAY_TOKEN")
    if not 0 <= wait_s < math.inf:
        raise SpecError("wait_s", wait_s, "a number of seconds, 0 or more")
    shown = server_tls_context(settings)
    stop = event_of_termination()
    async with connect(settings.redis_url, connections=REDIS_LIMIT) as client, TeacherClient(settings) as http:
        gateway = Gateway(client, http, settings, wait_s)
        app = build_app(gateway, client, token=settings.gateway_token)
        try:
            listener = open_listener(host, port)
        except OSError as error:
            raise GatewayError(f"can't listen on {host} port {port}: {error.strerror or error}") from None
        await first_completed(gateway.run(), _serve_app(app, listener, shown, on_ready, stop))
    log.info("gateway.stopped")


async def _serve_app(
    app: ASGIApp,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    on_ready: Callable[[str], None],
    stop: asyncio.Event,
) -> None:
    beside = MOST_CONNECTIONS + REDIS_LIMIT + OTHER_FILES
    most = connection_limit(CONNECTION_LIMIT, each=1, beside=beside)
    if most < FEWEST_CONNECTIONS:
        raise SpecError("open files", most + beside, f"{FEWEST_CONNECTIONS + beside} or more, by `ulimit -n`")
    async with serving(app, listener, connections=most, tls=tls, finish_s=FINISH_S) as url:
        on_ready(url)
        await stop.wait()
