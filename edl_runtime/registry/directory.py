"""Who is registered: list and watch. The lease set is the truth; the stream of events only says when to look."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.registry.members import Member
from edl_runtime.store import keys
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.keys import Role, Service
from edl_runtime.store.redis_client import decode_record, run_script, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

RETRY_EVERY_S = 0.5
"""While Redis does not answer."""
POLL_EVERY_S = 5.0
"""At the latest, news or not."""
SETTLE_S = 1.5
"""How long members stay listed that Redis has forgotten or let run out: those alive are back by then."""
BLOCK_S = 0.7
"""Longest single wait inside Redis; below the client's time limit for an answer."""
REDIS_TICK_S = 0.1
"""How much later than asked Redis may end a wait; a deadline's last moments are waited for here."""
POOL_LIST_TTL_S = 86_400
"""How long the list of pools is kept after one of their members said last that its pool is one."""
NO_EVENT = (0, 0)

log = get_logger(__name__)

# Made while one thread imports this: msgspec crashes when several threads are the first to decode a type.
_member_decoder = JsonDecoder(Member)


class Directory:
    """The members of all pools of one namespace."""

    def __init__(self, client: Redis, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    async def members(self, pool: str, role: Role = "teachers") -> list[Member]:
        """Return the members whose lease has not run out, by id. Raises RegistryUnavailableError."""
        return list((await self._look(Service(self._namespace, pool, role))).members)

    async def watch(self, pool: str, role: Role = "teachers") -> AsyncGenerator[list[Member], None]:
        """Yield the members, by id, at once and again after each change, for ever; close it when leaving it early.

        A killed member goes at its deadline. While Redis is away the last list stands; members that Redis forgot (it
        was emptied) or that ran out meanwhile stay listed for `SETTLE_S`, in which those alive come back.

        Raises RegistryUnavailableError when Redis is away at the start.
        """
        service = Service(self._namespace, pool, role)
        seen = await self._look(service)
        listing = _Listing(seen)
        yield listing.members
        away = False
        while True:
            before = listing.members
            try:
                if not away:
                    await self._wait_for_event(service, seen, listing.settles_in_s(time.monotonic()))
                seen = await self._look(service)
            except RegistryUnavailableError as error:
                if not away:
                    log.warning("registry.away", pool=pool, role=role, address=error.address, cause=error.cause)
                away = True
                await asyncio.sleep(RETRY_EVERY_S)
                continue
            if away:
                log.info("registry.back", pool=pool, role=role)
            listing.update(seen, time.monotonic(), after_outage=away)
            away = False
            if listing.members != before:
                yield listing.members

    async def contract(self, pool: str) -> ModelSignature | None:
        """Return what the pool's model takes and answers, None without teachers. Raises RegistryUnavailableError."""
        return (await self._look(Service(self._namespace, pool))).contract

    async def pools(self) -> list[str]:
        """Return the names of the pools that have members, sorted. Raises RegistryUnavailableError."""
        with unavailable_if_lost(self._client):
            names = await self._client.smembers(keys.pools(self._namespace))
        return [name for name in sorted(map(str, names)) if await self._is_alive(name) or not await self._forget(name)]

    async def _forget(self, pool: str) -> bool:
        """Take the name off the list, unless somebody joins meanwhile; return whether it is off."""
        with unavailable_if_lost(self._client):
            await self._client.srem(keys.pools(self._namespace), pool)
        if not await self._is_alive(pool):
            return True
        await add_to_pool_list(self._client, self._namespace, pool)
        return False

    async def _is_alive(self, pool: str) -> bool:
        return bool(await self.members(pool, "teachers") or await self.members(pool, "students"))

    async def _look(self, service: Service) -> _Snapshot:
        answer = await run_script(self._client, "members", keys.service_keys(service), [])
        records, contract, runs_out_ms, oldest, newest = answer
        return _Snapshot(
            members=sorted((m for m in map(_member, records) if m), key=lambda member: member.id),
            contract=decode_record(contract or None, ModelSignature),
            runs_out_in_s=runs_out_ms / 1000 if runs_out_ms >= 0 else math.inf,
            oldest_event=_event(oldest),
            newest_event=_event(newest),
        )

    async def _wait_for_event(self, service: Service, seen: _Snapshot, at_most_s: float) -> None:
        until = time.monotonic() + min(seen.runs_out_in_s, at_most_s, POLL_EVERY_S)
        ms, sequence = seen.newest_event
        while (rest_s := until - time.monotonic()) > REDIS_TICK_S:
            block_ms = math.ceil(min(rest_s - REDIS_TICK_S, BLOCK_S) * 1000)
            with unavailable_if_lost(self._client):
                if await self._client.xread(
                    {keys.service_key(service, "events"): f"{ms}-{sequence}"}, count=1, block=block_ms
                ):
                    return
        await asyncio.sleep(max(0.0, rest_s))


async def add_to_pool_list(client: Redis, namespace: str, pool: str) -> None:
    """Have `pool` on the list of pools, kept for `POOL_LIST_TTL_S` from now on. Raises RegistryUnavailableError."""
    key = keys.pools(namespace)
    with unavailable_if_lost(client):
        async with client.pipeline(transaction=True) as both:
            both.sadd(key, pool)
            both.expire(key, POOL_LIST_TTL_S)
            await both.execute()


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis said in one moment."""

    members: list[Member]
    contract: ModelSignature | None
    runs_out_in_s: float
    oldest_event: tuple[int, int]
    newest_event: tuple[int, int]


class _Listing:
    """The members as a watcher shows them: Redis's, and for a while those that Redis lost."""

    def __init__(self, first: _Snapshot) -> None:
        self.members = first.members
        self._newest_event = first.newest_event
        self._forgotten: list[Member] = []
        self._settled_at = -math.inf

    def settles_in_s(self, now: float) -> float:
        """How long until forgotten members go; infinite without any."""
        return max(0.0, self._settled_at - now) if self._forgotten else math.inf

    def update(self, seen: _Snapshot, now: float, *, after_outage: bool = False) -> None:
        known = self._newest_event
        emptied = known != NO_EVENT and (seen.oldest_event > known or seen.newest_event < known)
        if emptied or after_outage:
            # Nobody said that the members left: the events that we knew are gone, or they could not renew in time.
            self._forgotten, self._settled_at = self.members, now + SETTLE_S
        elif now >= self._settled_at:
            self._forgotten = []
        back = {member.id for member in seen.members}
        self._forgotten = [member for member in self._forgotten if member.id not in back]
        self._newest_event = seen.newest_event
        self.members = sorted([*seen.members, *self._forgotten], key=lambda member: member.id)


def _member(record: str) -> Member | None:
    try:
        return _member_decoder.decode(record)
    except msgspec.DecodeError as error:
        log.warning("member.unreadable", record=record[:200], cause=str(error))
        return None


def _event(stream_id: str) -> tuple[int, int]:
    ms, sequence = stream_id.split("-")
    return int(ms), int(sequence)
