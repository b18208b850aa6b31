"""Lists and watches the members of pools. The leases are authoritative; events only say when to read them again."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.registry.members import Member
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError, RegistryUnavailableError
from edl_runtime.store.keys import Role, Service
from edl_runtime.store.redis_client import decode_record, readable, run_script, run_script_on_each, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

RETRY_EVERY_S = 0.5
"""While Redis is unavailable."""
POLL_EVERY_S = 5.0
"""Longest time between two reads, with or without events."""
SETTLE_S = 1.5
"""How long members stay listed after Redis lost them or an outage ended: living ones have registered again by then."""
BLOCK_S = 0.7
"""Longest single blocking read; below the client's timeout."""
REDIS_TICK_S = 0.1
"""By how much Redis may overrun a blocking read, so the last moments before a deadline are slept here."""
POOL_LIST_TTL_S = 86_400
"""How long the list of pools is kept after a member last added its pool."""
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
        """Return the members with a valid lease, by id. Raises RegistryUnavailableError."""
        return list((await self._read(Service(self._namespace, pool, role))).members)

    async def watch(self, pool: str, role: Role = "teachers") -> AsyncGenerator[list[Member], None]:
        """Yield the members, by id, at once and after each change. Close it when leaving it early.

        A killed member is removed when its lease expires. During an outage of Redis the last list stays; members that
        Redis has lost, or whose lease expired meanwhile, stay listed for `SETTLE_S` so that living ones can return.

        Raises RegistryUnavailableError when Redis is unavailable at the start.
        """
        service = Service(self._namespace, pool, role)
        seen = await self._read(service)
        listing = _Listing(seen)
        yield listing.members
        away = False
        while True:
            before = listing.members
            try:
                if not away:
                    await self._wait_for_event(service, seen, listing.settles_in_s(time.monotonic()))
                seen = await self._read(service)
            except RegistryUnavailableError as error:
                if not away:
                    log.warning("registry.unavailable", pool=pool, role=role, address=error.address, cause=error.cause)
                away = True
                await asyncio.sleep(RETRY_EVERY_S)
                continue
            if away:
                log.info("registry.recovered", pool=pool, role=role)
            listing.update(seen, time.monotonic(), after_outage=away)
            away = False
            if listing.members != before:
                yield listing.members

    async def contract(self, pool: str) -> ModelSignature | None:
        """Return the signature of the pool's model, None without teachers. Raises RegistryUnavailableError."""
        return (await self._read(Service(self._namespace, pool))).contract

    async def known_pools(self) -> list[str]:
        """Return the names of the pools that have members, and of some that had within a day, sorted.

        One round trip. Raises RegistryUnavailableError.
        """
        key = keys.pools(self._namespace)
        with unavailable_if_lost(self._client, key):
            return sorted(map(str, await self._client.smembers(key)))

    async def pools(self) -> list[str]:
        """Return the names of the pools that have members, sorted. Raises RegistryUnavailableError."""
        return list(await self.members_of_pools())

    async def members_of_pools(self) -> dict[str, PoolMembers | MalformedRecordError]:
        """Return the members of each pool that has any, by name, sorted, or the error of one that can't be read.

        Two round trips for all pools, and some for each that has lost its last member. Raises RegistryUnavailableError.
        """
        names = await self.known_pools()
        services = [keys.service_keys(Service(self._namespace, name, role)) for name in names for role in keys.ROLES]
        answers = await run_script_on_each(self._client, "members", services)
        found: dict[str, PoolMembers | MalformedRecordError] = {}
        for name, both in zip(names, zip(answers[::2], answers[1::2], strict=True), strict=True):
            try:
                teachers, students = (_snapshot(readable(answer)) for answer in both)
            except MalformedRecordError as error:
                found[name] = error
                continue
            there = PoolMembers(teachers.members, students.members, teachers.contract)
            if there.teachers or there.students or not await self._forget(name):
                found[name] = there
        return found

    async def _forget(self, pool: str) -> bool:
        """Remove the name from the list, unless a member joins meanwhile; return whether it was removed."""
        with unavailable_if_lost(self._client):
            await self._client.srem(keys.pools(self._namespace), pool)
        if not await self._is_alive(pool):
            return True
        await add_to_pool_list(self._client, self._namespace, pool)
        return False

    async def _is_alive(self, pool: str) -> bool:
        return bool(await self.members(pool, "teachers") or await self.members(pool, "students"))

    async def _read(self, service: Service) -> _Snapshot:
        return _snapshot(await run_script(self._client, "members", keys.service_keys(service), []))

    async def _wait_for_event(self, service: Service, seen: _Snapshot, at_most_s: float) -> None:
        until = time.monotonic() + min(seen.expires_in_s, at_most_s, POLL_EVERY_S)
        ms, sequence = seen.newest_event
        events = keys.service_key(service, "events")
        while (rest_s := until - time.monotonic()) > REDIS_TICK_S:
            block_ms = math.ceil(min(rest_s - REDIS_TICK_S, BLOCK_S) * 1000)
            with unavailable_if_lost(self._client, events):
                if await self._client.xread({events: f"{ms}-{sequence}"}, count=1, block=block_ms):
                    return
        await asyncio.sleep(max(0.0, rest_s))


async def add_to_pool_list(client: Redis, namespace: str, pool: str) -> None:
    """Add `pool` to the list of pools, kept for `POOL_LIST_TTL_S` from now on. Raises RegistryUnavailableError."""
    key = keys.pools(namespace)
    with unavailable_if_lost(client, key):
        async with client.pipeline(transaction=True) as both:
            both.sadd(key, pool)
            both.expire(key, POOL_LIST_TTL_S)
            await both.execute()


class PoolMembers(NamedTuple):
    """A pool's teachers and students, by id, and its model, None without teachers."""

    teachers: list[Member]
    students: list[Member]
    model: ModelSignature | None


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a service in Redis at one moment."""

    members: list[Member]
    contract: ModelSignature | None
    expires_in_s: float
    oldest_event: tuple[int, int]
    newest_event: tuple[int, int]


def _snapshot(answer: Any) -> _Snapshot:
    records, contract, expires_ms, oldest, newest = answer
    return _Snapshot(
        members=sorted((m for m in map(_member, records) if m), key=lambda member: member.id),
        contract=decode_record(contract or None, ModelSignature),
        expires_in_s=expires_ms / 1000 if expires_ms >= 0 else math.inf,
        oldest_event=_event(oldest),
        newest_event=_event(newest),
    )


class _Listing:
    """The members as a watcher shows them: those in Redis, and for `SETTLE_S` those that Redis has lost."""

    def __init__(self, first: _Snapshot) -> None:
        self.members = first.members
        self._newest_event = first.newest_event
        self._lost: list[Member] = []
        self._settled_at = -math.inf

    def settles_in_s(self, now: float) -> float:
        """How long until lost members are removed; infinite without any."""
        return max(0.0, self._settled_at - now) if self._lost else math.inf

    def update(self, seen: _Snapshot, now: float, *, after_outage: bool = False) -> None:
        known = self._newest_event
        emptied = known != NO_EVENT and (seen.oldest_event > known or seen.newest_event < known)
        if emptied or after_outage:
            # No event said that the members left: known events are gone from Redis, or members could not renew in time.
            self._lost, self._settled_at = self.members, now + SETTLE_S
        elif now >= self._settled_at:
            self._lost = []
        back = {member.id for member in seen.members}
        self._lost = [member for member in self._lost if member.id not in back]
        self._newest_event = seen.newest_event
        self.members = sorted([*seen.members, *self._lost], key=lambda member: member.id)


def _member(record: str) -> Member | None:
    try:
        return _member_decoder.decode(record)
    except msgspec.DecodeError as error:
        log.warning("member.unreadable", record=record[:200], cause=str(error))
        return None


def _event(stream_id: str) -> tuple[int, int]:
    ms, sequence = stream_id.split("-")
    return int(ms), int(sequence)
