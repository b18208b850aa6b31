"""The server of the discovery endpoint."""

from __future__ import annotations

from collections.abc import Callable

from edl_runtime.concurrency import event_of_termination
from edl_runtime.discovery.app import build_app
from edl_runtime.discovery.assignments import StudentRegistry
from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger
from edl_runtime.protocol.address import check_exposure
from edl_runtime.protocol.asgi_server import open_listener, serving
from edl_runtime.protocol.listener import connection_limit
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
OTHER_FILES = 256
"""Descriptors that are neither students' nor Redis's."""

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
    stop = event_of_termination()
    most = connection_limit(CONNECTION_LIMIT, each=1, beside=REDIS_LIMIT + OTHER_FILES)
    async with connect(settings.redis_url, connections=REDIS_LIMIT) as client:
        registry = StudentRegistry(client, settings.namespace, ttl_s=settings.lease_ttl_s, most_pools=POOL_LIMIT)
        app = build_app(registry, client, settings.namespace, token=settings.discovery_token)
        try:
            listener = open_listener(host, port)
        except OSError as error:
            raise RegistryError(f"can't listen on {host} port {port}: {error.strerror or error}") from None
        async with serving(app, listener, connections=most, tls=shown) as url:
            on_ready(url)
            await stop.wait()
            registry.close()
    log.info("discovery.stopped")
