"""Keeps servers that are not ours in a pool while they serve their model, as `edl register` does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from edl_runtime.concurrency import event_of_termination, first_completed, unless_stopped
from edl_runtime.errors import EdlError, SpecError
from edl_runtime.external.address import ServerAddress, check_distinct
from edl_runtime.external.connection import check_timeout_s, watch_connection
from edl_runtime.log import get_logger
from edl_runtime.protocol.errors import InferenceError, ProtocolError, TeacherError
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.tls import Trust, client_trust
from edl_runtime.registry.drain import is_drained
from edl_runtime.registry.errors import DrainedError, SupersededError
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import check_weight
from edl_runtime.store import redis_client
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.keys import Service

if TYPE_CHECKING:
    from redis.asyncio import Redis

CHECK_EVERY_S = 0.2
"""How often a server is asked whether its model is ready: a killed one has to leave within half a second."""

REPORT_EVERY_S = 5.0

RETRY_EVERY_S = 5.0
"""How often a server is tried again that was in the pool and came back with a model that the pool rejects."""

DRAINED_CHECK_EVERY_S = 1.0

log = get_logger(__name__)


class RegisterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which servers join which pool. Raises SpecError.

    - `servers`: their addresses as this process reaches them; each one once.
    - `advertise`: the host by which students reach them; empty for the same one.
    - `weight`: each one's share of the pool's work, relative to the others.
    - `drain_s`: seconds from leaving the pool to the end, in which students have their last answers.
    """

    pool: str
    servers: Sequence[ServerAddress]
    advertise: str = ""
    weight: float = 1.0
    drain_s: float = 2.0

    def __post_init__(self) -> None:
        check_weight(self.weight)
        check_distinct(self.servers, "servers", self.advertise)
        if not 0 <= self.drain_s < 3600:
            raise SpecError("drain_s", self.drain_s, "seconds from 0 to 3600")


async def keep_registered(
    options: RegisterOptions,
    settings: RuntimeSettings,
    on_joined: Callable[[str, ModelSignature], None],
    on_left: Callable[[str], None],
) -> None:
    """Register each server while its model is ready, until SIGTERM or SIGINT; then leave the pool and return.

    `on_joined` is called with the address each time, and `on_left` afterwards. A server leaves the pool when it refuses
    connections, reports its model as not ready, does not answer for `check_timeout_s`, or comes back with a model that
    the pool rejects; it is back when that is over. A drained server stays out until the drain is undone.

    Raises for the first server that can't join at all: SpecError for a model whose signature the server does not tell,
    PoolMismatchError for one that is not the pool's, InferenceError for one that refuses a request of one row,
    SupersededError for one that another process registers, RegistryUnavailableError without Redis.
    """
    if not settings.redis_url:
        raise SpecError("EDL_REDIS_URL", "", f"the Redis of pool {options.pool!r}, as in redis://127.0.0.1:6379/0")
    stop = event_of_termination()
    async with redis_client.connect(settings.redis_url) as client:
        service = Service(settings.namespace, options.pool)

        async def keep(server: ServerAddress) -> EdlError:
            with _Watched(server, settings, client_trust(settings)) as watched:
                return await keep_watched(watched, str(server.reached_at(options.advertise)))

        async def keep_watched(watched: _Watched, address: str) -> EdlError:
            has_joined = False
            while True:
                rejection: EdlError | None
                try:
                    if has_joined:
                        await _wait_undrained(client, service, address)
                    signature = await watched.wait_ready()
                    member = Member(id=address, address=address, weight=options.weight, signature=signature)
                    async with hold_lease(client, service, member, ttl_s=settings.lease_ttl_s) as lease:
                        has_joined = True
                        on_joined(address, signature)
                        try:
                            rejection = await first_completed(lease.wait_rejected(), watched.wait_lost())
                        finally:
                            on_left(address)
                except EdlError as error:
                    rejection = error
                if isinstance(rejection, SupersededError) or (rejection and not has_joined):
                    return rejection
                log.warning("server.left", pool=options.pool, address=address, cause=str(rejection or watched.cause))
                await asyncio.sleep(RETRY_EVERY_S if rejection and not isinstance(rejection, DrainedError) else 0)

        reason = await unless_stopped(stop, first_completed(*(keep(server) for server in options.servers)))
    if reason is not None:
        raise reason
    log.info("server.deregistered", pool=options.pool, drain_s=options.drain_s)
    await asyncio.sleep(options.drain_s)


async def _wait_undrained(client: Redis, service: Service, address: str) -> None:
    """Return once the server has not been drained, or may join again; also while Redis is away it stays out."""
    logged = False
    while True:
        with suppress(RegistryUnavailableError):
            if not await is_drained(client, service, address):
                return
            if not logged:
                advice = f"`edl drain --undo {service.pool} {address}` or a restart of this process brings it back"
                log.warning("server.drained", pool=service.pool, address=address, advice=advice)
            logged = True
        await asyncio.sleep(DRAINED_CHECK_EVERY_S)


class _Watched:
    """A server that is asked again and again; `cause` tells why its model is not ready.

    It has a thread of its own, which the block ends: servers that hang don't delay what others are asked.
    """

    def __init__(self, server: ServerAddress, settings: RuntimeSettings, trust: Trust | None) -> None:
        self.cause = ""
        self._address = str(server)
        self._limit_s = check_timeout_s(server) + CHECK_EVERY_S
        self._connection = watch_connection(server, settings, trust)
        self._thread = ThreadPoolExecutor(1, f"edl watches {self._address}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()  # makes a call in the thread raise
        self._thread.shutdown(wait=False)

    async def wait_ready(self) -> ModelSignature:
        """Return the model's signature once it has answered a request. Raises SpecError, InferenceError."""
        loop = asyncio.get_running_loop()
        report_at = loop.time() + REPORT_EVERY_S
        while True:
            if await self._is_ready():
                try:
                    return await loop.run_in_executor(self._thread, self._connection.signature)
                except (OSError, ProtocolError) as error:
                    self.cause = str(error) or type(error).__name__
                except InferenceError as error:
                    if not error.retryable:
                        raise
                    self.cause = str(error)
            if loop.time() >= report_at:
                report_at = loop.time() + REPORT_EVERY_S
                log.info("server.awaited", address=self._address, cause=self.cause)
            await asyncio.sleep(CHECK_EVERY_S)

    async def wait_lost(self) -> None:
        """Return once the model is not ready any more."""
        while await self._is_ready():  # noqa: ASYNC110 - the server sends no event
            await asyncio.sleep(CHECK_EVERY_S)

    async def _is_ready(self) -> bool:
        try:
            # The connection's own limit comes first, unless an answer drips or a name is not resolved.
            async with asyncio.timeout(self._limit_s):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.ready)
        except (OSError, ProtocolError, TeacherError) as error:
            self.cause = str(error) or type(error).__name__
            return False
        self.cause = ""
        return True
