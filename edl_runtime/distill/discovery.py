"""Finding teachers in Redis: a student of its pool, that computes by itself which of the teachers are its own."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Callable, Collection, Sequence

import structlog

from edl_runtime.balance.assign import assign
from edl_runtime.distill.teachers import Discovered
from edl_runtime.errors import RegistryError
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.client import connect

log = structlog.get_logger(__name__)

Use = Callable[[Collection[str]], None]
"""Takes the addresses of the teachers to use from now on."""


async def follow_pool(wish: Discovered, settings: RuntimeSettings, use: Use) -> None:
    """Be a student of the pool and call `use` whenever the teachers to use change, until cancelled.

    While Redis is away, the teachers in use stay in use. Raises RegistryUnavailableError when it is away at the start.
    """
    who = f"{settings.job or 'student'}-{settings.instance}-{uuid.uuid4().hex[:8]}"
    me = Member(id=who, address=f"{socket.gethostname()}:{os.getpid()}", want=wish.at_most)
    service = keys.Service(settings.namespace, wish.pool, "students")
    async with connect(settings.redis_url) as client, hold_lease(client, service, me, ttl_s=settings.lease_ttl_s):
        directory = Directory(client, settings.namespace)
        choice = _Choice(me, use)
        try:
            async with asyncio.TaskGroup() as watches:
                watches.create_task(_each(directory, wish.pool, "teachers", choice.see_teachers))
                watches.create_task(_each(directory, wish.pool, "students", choice.see_students))
        except* RegistryError as group:
            raise group.exceptions[0] from None


async def _each(directory: Directory, pool: str, role: keys.Role, see: Callable[[Sequence[Member]], None]) -> None:
    async for members in directory.watch(pool, role):
        see(members)


class _Choice:
    """The teachers that are this student's, by the latest lists of both roles."""

    def __init__(self, me: Member, use: Use) -> None:
        self._me = me
        self._use = use
        self._teachers: Sequence[Member] | None = None
        self._students: Sequence[Member] | None = None
        self._mine: dict[str, str] | None = None

    def see_teachers(self, teachers: Sequence[Member]) -> None:
        self._teachers = teachers
        self._choose()

    def see_students(self, students: Sequence[Member]) -> None:
        self._students = students
        self._choose()

    def _choose(self) -> None:
        if self._teachers is None or self._students is None:
            return
        wants = {student.id: student.want for student in (*self._students, self._me)}
        assigned = assign({teacher.id: teacher.weight for teacher in self._teachers}, wants)[self._me.id]
        addresses = {teacher.id: teacher.address for teacher in self._teachers}
        mine = {teacher: addresses[teacher] for teacher in assigned}
        if mine != self._mine:
            log.info("teachers.assigned", teachers=sorted(mine.values()), students=len(wants), listed=len(addresses))
            self._mine = mine
            self._use(sorted(set(mine.values())))
