"""Finding teachers: being a student of a pool, in Redis or behind a discovery endpoint.

With Redis a student computes by itself which of the teachers are its own; an endpoint does it for others alike.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from edl_runtime.discovery.client import follow
from edl_runtime.discovery.link import Link
from edl_runtime.discovery.messages import Assignment
from edl_runtime.distill.teachers import Discovered
from edl_runtime.errors import RegistryError, RegistryUnavailableError
from edl_runtime.registry import quarantine
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.registry.shares import shares
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis

TELL_EVERY_S = 1.0
"""How often a student says which teachers it keeps in quarantine."""

log = structlog.get_logger(__name__)

Use = Callable[[Collection[str]], None]
"""Takes the addresses of the teachers to use from now on."""

Quarantined = Callable[[], Mapping[str, str]]
"""Returns the addresses of the teachers that are asked nothing now, and why."""


async def follow_pool(wish: Discovered, settings: RuntimeSettings, use: Use, quarantined: Quarantined) -> None:
    """Be a student of the pool and call `use` whenever the teachers to use change, until cancelled.

    What `quarantined` returns is told to whoever looks at the pool, about once a second.

    While Redis or the endpoint is away, the teachers in use stay in use. Away at the start raises
    RegistryUnavailableError or DiscoveryUnavailableError; an endpoint that refuses, DiscoveryRefusedError.
    """
    who = f"{settings.job or 'student'}-{settings.instance}-{uuid.uuid4().hex[:8]}"
    me = Member(id=who, address=f"{socket.gethostname()}:{os.getpid()}", want=wish.at_most)
    if settings.redis_url:
        await _follow_registry(wish.pool, me, settings, use, quarantined)
    else:
        await _follow_endpoint(wish.pool, me, settings, use, quarantined)


async def _follow_endpoint(
    pool: str, me: Member, settings: RuntimeSettings, use: Use, quarantined: Quarantined
) -> None:
    mine: tuple[str, ...] | None = None

    def see(assignment: Assignment) -> None:
        nonlocal mine
        if assignment.teachers != mine:
            mine = assignment.teachers
            log.info("teachers.assigned", teachers=mine, students=assignment.students, listed=assignment.listed)
            use(mine)

    async with Link(settings.discovery_url, settings.discovery_token) as link:
        await follow(link, pool, me, see, quarantined)


async def _follow_registry(
    pool: str, me: Member, settings: RuntimeSettings, use: Use, quarantined: Quarantined
) -> None:
    service = keys.Service(settings.namespace, pool, "students")
    async with connect(settings.redis_url) as client, hold_lease(client, service, me, ttl_s=settings.lease_ttl_s):
        directory = Directory(client, settings.namespace)
        choice = _Choice(me, use)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_each(directory, pool, "teachers", choice.see_teachers))
                tasks.create_task(_each(directory, pool, "students", choice.see_students))
                tasks.create_task(_tell(client, service, me, quarantined))
        except* RegistryError as group:
            raise group.exceptions[0] from None


async def _each(directory: Directory, pool: str, role: keys.Role, see: Callable[[Sequence[Member]], None]) -> None:
    async for members in directory.watch(pool, role):
        see(members)


async def _tell(client: Redis, service: keys.Service, me: Member, quarantined: Quarantined) -> None:
    told = False
    while True:
        reasons = quarantined()
        if reasons or told:
            try:
                await quarantine.publish(client, service.namespace, service.pool, me.id, reasons)
                told = bool(reasons)
            except RegistryUnavailableError:
                pass  # which the watches report; it is told again
        await asyncio.sleep(TELL_EVERY_S)


class _Choice:
    """The teachers that are this student's, by the latest lists of both roles."""

    def __init__(self, me: Member, use: Use) -> None:
        self._me = me
        self._use = use
        self._teachers: Sequence[Member] | None = None
        self._students: Sequence[Member] | None = None
        self._mine: tuple[str, ...] | None = None

    def see_teachers(self, teachers: Sequence[Member]) -> None:
        self._teachers = teachers
        self._choose()

    def see_students(self, students: Sequence[Member]) -> None:
        self._students = students
        self._choose()

    def _choose(self) -> None:
        if self._teachers is None or self._students is None:
            return
        mine = shares(self._teachers, [*self._students, self._me])[self._me.id]
        if mine != self._mine:
            log.info("teachers.assigned", teachers=mine, students=len(self._students), listed=len(self._teachers))
            self._mine = mine
            self._use(mine)
