"""Registrations in the registry: leases that are renewed until the holder leaves.

A lease lasts `ttl_s` and is renewed every third of that, at least once a second. The holder keeps trying while Redis is
unavailable, and registers again with a new fencing token if its lease has expired or Redis was emptied. The record in
Redis carries a random name of its holder, so a holder that missed the answer to its registration recognises itself.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Self

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.registry.directory import add_to_pool_list
from edl_runtime.registry.errors import DrainedError, PoolMismatchError, SupersededError
from edl_runtime.registry.members import Member, signature_differences
from edl_runtime.store import keys
from edl_runtime.store.errors import RegistryError, RegistryUnavailableError
from edl_runtime.store.redis_client import malformed_if_unreadable, run_script

if TYPE_CHECKING:
    from redis.asyncio import Redis

RENEW_EVERY_S = 1.0
"""At most, however long the lease: a member is back so soon after Redis was emptied."""
RETRY_EVERY_S = 0.5
"""While Redis is unavailable."""
ADD_TO_POOL_LIST_EVERY_S = 600.0
"""How often a member adds its pool to the list of pools again: that key is kept for a day and may be lost alone."""

MakeReport = Callable[[], msgspec.Struct | None]
"""Returns a member's current report, None for none. Called on the event loop, so it must not block."""

log = get_logger(__name__)


class Lease:
    """A registration that is renewed; made by `hold_lease`. `fence` is the current fencing token."""

    def __init__(
        self, client: Redis, service: keys.Service, member: Member, ttl_s: float, make_report: MakeReport
    ) -> None:
        self.fence = 0
        self._client = client
        self._service = service
        self._member = member
        self._ttl_s = ttl_s
        self._make_report = make_report
        self._holder = secrets.token_hex(8)
        self._keeping: asyncio.Task[RegistryError] | None = None
        self._list_at = 0.0

    async def wait_rejected(self) -> RegistryError:
        """Wait until the registry rejects this registration for good, and return why. May wait for ever.

        PoolMismatchError: Redis was emptied and teachers of another model joined the pool first.
        SupersededError: another process registered with this id. DrainedError: it was drained.
        """
        if self._keeping is None:
            raise RuntimeError("the lease is not held; use hold_lease")
        return await asyncio.shield(self._keeping)

    async def __aenter__(self) -> Self:
        await self._register()
        self._keeping = asyncio.create_task(self._keep(), name=f"lease of {self._member.id}")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._keeping is None:
            return
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
        with suppress(RegistryUnavailableError):  # the lease will expire
            await self._run("release", self._member.id, self._holder)
        if not self._keeping.cancelled():
            self._keeping.result()  # raise an unexpected error that nobody waited for

    async def _keep(self) -> RegistryError:
        away = False
        took_s = 0.0
        while True:
            await asyncio.sleep(pause_s(self._ttl_s, took_s, away=away))
            began = time.monotonic()
            try:
                await self._renew()
            except RegistryUnavailableError as error:
                if not away:
                    log.warning(
                        "registry.unavailable", member=self._member.id, address=error.address, cause=error.cause
                    )
                away = True
            except RegistryError as error:
                log.warning("lease.rejected", member=self._member.id, pool=self._service.pool, cause=str(error))
                return error
            else:
                if away:
                    log.info("registry.recovered", member=self._member.id)
                away = False
            took_s = time.monotonic() - began

    async def _renew(self) -> None:
        report = self._make_report()
        text = "" if report is None else msgspec.json.encode(report).decode()
        answer: str = await self._run("renew", self._member.id, self._holder, _ms(self._ttl_s), text)
        if answer == "drained":
            raise DrainedError(self._service.pool, self._member.id)
        if answer == "taken":
            raise SupersededError(self._service.pool, self._member.id)
        if answer == "gone":
            await self._register()
        else:
            self.fence = int(answer)  # a later one if the answer to a registration was lost
        if time.monotonic() >= self._list_at:
            await self._add_to_list()

    async def _register(self) -> None:
        """Register; if the pool has another model, wait once for its leases to expire: its teachers may be dead."""
        ours = self._member.signature
        member = msgspec.json.encode(msgspec.structs.replace(self._member, fence=0)).decode()
        record = f'{{"holder":"{self._holder}",{member[1:]}'
        contract = msgspec.json.encode(ours).decode() if ours else ""
        waited = False
        while True:
            granted, *answer = await self._run("register", self._member.id, _ms(self._ttl_s), record, contract)
            if granted:
                self.fence = answer[0]
                break
            with malformed_if_unreadable(keys.service_key(self._service, "contract")):
                theirs, expires_ms = JsonDecoder(ModelSignature).decode(answer[0]), answer[1]
            different = signature_differences(theirs, ours) if ours else []
            if not different:
                contract = answer[0]  # the same model, encoded differently
            elif waited:
                raise PoolMismatchError(self._service.pool, different)
            else:
                waited = True
                await asyncio.sleep(expires_ms / 1000 + 0.01)
        await self._add_to_list()
        log.info(
            "member.registered",
            pool=self._service.pool,
            role=self._service.role,
            member=self._member.id,
            address=self._member.address,
            fence=self.fence,
        )

    async def _add_to_list(self) -> None:
        await add_to_pool_list(self._client, self._service.namespace, self._service.pool)
        self._list_at = time.monotonic() + ADD_TO_POOL_LIST_EVERY_S

    async def _run(self, script: str, *args: str | int) -> Any:
        return await run_script(self._client, script, keys.service_keys(self._service), args)


def pause_s(ttl_s: float, took_s: float, *, away: bool) -> float:
    """Return how long to wait after a renewal that took `took_s`, so that slow answers don't delay the next one."""
    every_s = min(ttl_s / 3, RENEW_EVERY_S)
    return max(0.0, (min(every_s, RETRY_EVERY_S) if away else every_s) - took_s)


def hold_lease(
    client: Redis, service: keys.Service, member: Member, *, ttl_s: float = 3.0, make_report: MakeReport = lambda: None
) -> AbstractAsyncContextManager[Lease]:
    """Register `member` in `service` during the block. Outages of Redis are survived.

    If the process dies, the registration expires after `ttl_s`. Entering may take up to `ttl_s` longer, until leases of
    dead teachers of another model have expired. Each renewal also stores what `make_report` returns, for
    `edl_runtime.registry.pools`.

    Raises SpecError for a `ttl_s` that is not above 0; on entering, PoolMismatchError and RegistryUnavailableError.
    """
    if not ttl_s > 0:
        raise SpecError("lease_ttl_s", ttl_s, "seconds above 0")
    return Lease(client, service, member, ttl_s, make_report)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
