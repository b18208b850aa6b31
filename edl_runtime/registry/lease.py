"""Being registered: a lease that is renewed until one leaves.

A lease is granted for `ttl_s` by a clock that goes by Redis's, but never back, and renewed every third of that, at
least once a second. While Redis is away the holder keeps trying; a Redis that came back empty, or a holder that was
stopped for too long, is a registration anew with a new fencing token. The record in Redis carries a random name of its
holder: one that starved and missed the answer to its registration finds itself there, and not somebody who superseded
it.
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
from edl_runtime.registry.errors import PoolMismatchError, SupersededError
from edl_runtime.registry.members import Member, differences
from edl_runtime.store import keys
from edl_runtime.store.errors import RegistryError, RegistryUnavailableError
from edl_runtime.store.redis_client import malformed_if_unreadable, run_script

if TYPE_CHECKING:
    from redis.asyncio import Redis

RENEW_EVERY_S = 1.0
"""At the latest: so soon is a member back in a Redis that was emptied, however long its lease."""
RETRY_EVERY_S = 0.5
"""While Redis does not answer."""
ADD_TO_POOL_LIST_EVERY_S = 600.0
"""How often a member puts its pool on the list of pools anew, which is kept for a day and may be lost alone."""

MakeReport = Callable[[], msgspec.Struct | None]
"""Returns what a member reports at the moment, None for nothing; called on the event loop, so it returns at once."""

log = get_logger(__name__)


class Lease:
    """A registration that is being kept up; `hold_lease` makes it. `fence` is the current fencing token."""

    def __init__(self, client: Redis, service: keys.Service, member: Member, ttl_s: float, says: MakeReport) -> None:
        self.fence = 0
        self._client = client
        self._service = service
        self._member = member
        self._ttl_s = ttl_s
        self._says = says
        self._holder = secrets.token_hex(8)
        self._keeping: asyncio.Task[RegistryError] | None = None
        self._list_at = 0.0

    async def refused(self) -> RegistryError:
        """Wait until this registration can never come back and return why; for ever, if all goes well.

        PoolMismatchError: Redis came back empty and teachers of another model were in the pool first.
        SupersededError: somebody else registered with this id.
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
        with suppress(RegistryUnavailableError):  # it will run out by itself
            await self._run("release", self._member.id, self.fence)
        if not self._keeping.cancelled():
            self._keeping.result()  # a failure that nobody waited for is not to be lost

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
                    log.warning("registry.away", member=self._member.id, address=error.address, cause=error.cause)
                away = True
            except RegistryError as error:
                log.warning("lease.refused", member=self._member.id, pool=self._service.pool, cause=str(error))
                return error
            else:
                if away:
                    log.info("registry.back", member=self._member.id)
                away = False
            took_s = time.monotonic() - began

    async def _renew(self) -> None:
        report = self._says()
        text = "" if report is None else msgspec.json.encode(report).decode()
        answer: str = await self._run("renew", self._member.id, self.fence, _ms(self._ttl_s), text, self._holder)
        if answer == "taken":
            raise SupersededError(self._service.pool, self._member.id)
        if answer == "gone":
            await self._register()
        else:
            self.fence = int(answer)  # a later one where a registration was not answered
        if time.monotonic() >= self._list_at:
            await self._list()

    async def _register(self) -> None:
        """Register, waiting once for leases that stand in the way to run out: their holders may be dead."""
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
                theirs, runs_out_ms = JsonDecoder(ModelSignature).decode(answer[0]), answer[1]
            different = differences(theirs, ours) if ours else []
            if not different:
                contract = answer[0]  # the same in other words
            elif waited:
                raise PoolMismatchError(self._service.pool, different)
            else:
                waited = True
                await asyncio.sleep(runs_out_ms / 1000 + 0.01)
        await self._list()
        log.info(
            "member.registered",
            pool=self._service.pool,
            role=self._service.role,
            member=self._member.id,
            address=self._member.address,
            fence=self.fence,
        )

    async def _list(self) -> None:
        await add_to_pool_list(self._client, self._service.namespace, self._service.pool)
        self._list_at = time.monotonic() + ADD_TO_POOL_LIST_EVERY_S

    async def _run(self, script: str, *args: str | int) -> Any:
        return await run_script(self._client, script, keys.service_keys(self._service), args)


def pause_s(ttl_s: float, took_s: float, *, away: bool) -> float:
    """Return how long to wait after a try that `took_s`: a slow answer takes nothing from the next try's time."""
    every_s = min(ttl_s / 3, RENEW_EVERY_S)
    return max(0.0, (min(every_s, RETRY_EVERY_S) if away else every_s) - took_s)


def hold_lease(
    client: Redis, service: keys.Service, member: Member, *, ttl_s: float = 3.0, says: MakeReport = lambda: None
) -> AbstractAsyncContextManager[Lease]:
    """Be registered as `member` of `service` from the first line of the block to its end.

    The member leaves the list with the block, or `ttl_s` after its process died or lost Redis. Redis going away
    during the block is ridden out. Entering takes up to `ttl_s` longer when dead teachers of another model have yet to
    run out.

    What `says` returns is kept beside the member each time that its lease is renewed, and goes with it: a report costs
    no command of its own. `edl_runtime.registry.pools` reads it.

    Raises SpecError for a `ttl_s` that is not above 0; on entering, PoolMismatchError and RegistryUnavailableError.
    """
    if not ttl_s > 0:
        raise SpecError("lease_ttl_s", ttl_s, "seconds above 0")
    return Lease(client, service, member, ttl_s, says)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
