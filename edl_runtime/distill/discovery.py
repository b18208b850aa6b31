"""Finding teachers: being a student of a pool, in Redis or behind a discovery endpoint.

With Redis a student computes by itself which of the teachers are its own, by the feed that an endpoint has for others.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from edl_runtime.discovery.client import follow
from edl_runtime.discovery.feed import Feed
from edl_runtime.discovery.link import Link
from edl_runtime.discovery.messages import Assignment, Words
from edl_runtime.distill.teachers import Discovered
from edl_runtime.errors import DiscoverySilentError, RegistrySilentError, RegistryUnavailableError
from edl_runtime.log import get_logger
from edl_runtime.registry import quarantine
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.client import connect
from edl_runtime.waits import first

if TYPE_CHECKING:
    from redis.asyncio import Redis

TELL_EVERY_S = 1.0
"""How often a student says which teachers it keeps in quarantine."""

log = get_logger(__name__)

Use = Callable[[Collection[str]], None]
"""Takes the addresses of the teachers to use from now on."""

Lacks = Callable[[str], None]
"""Takes why teachers can't be found, in words."""

Say = Callable[[], Words]
"""Returns which teachers are asked nothing now, and what the student needs."""


async def follow_pool(wish: Discovered, settings: RuntimeSettings, use: Use, lacks: Lacks, say: Say) -> None:
    """Be a student of the pool and call `use` whenever the teachers to use change, until cancelled.

    What `say` returns is told to whoever looks at the pool, about once a second.

    While Redis or the endpoint is away, the teachers in use stay in use. Away at the start raises
    RegistryUnavailableError or DiscoveryUnavailableError; an endpoint that refuses, DiscoveryRefusedError. Who is only
    silent is asked again until an answer comes, and `lacks` is called with what is wrong: how long to wait for teachers
    is the script's to say, and slow answers alone end no training.
    """
    who = f"{settings.job or 'student'}-{settings.instance}-{uuid.uuid4().hex[:8]}"
    me = Member(id=who, address=f"{socket.gethostname()}:{os.getpid()}", want=wish.at_most)
    follow_them = _follow_registry if settings.redis_url else _follow_endpoint
    see = _changes(use)
    while True:
        try:
            await follow_them(wish.pool, me, settings, see, say)
        except (RegistrySilentError, DiscoverySilentError) as error:
            lacks(str(error))
            log.warning("registry.away", pool=wish.pool, cause=str(error))


async def _follow_endpoint(
    pool: str, me: Member, settings: RuntimeSettings, see: Callable[[Assignment], None], say: Say
) -> None:
    async with Link(settings.discovery_url, settings.discovery_token) as link:
        await follow(link, pool, me, see, say)


async def _follow_registry(
    pool: str, me: Member, settings: RuntimeSettings, see: Callable[[Assignment], None], say: Say
) -> None:
    service = keys.Service(settings.namespace, pool, "students")
    async with (
        connect(settings.redis_url) as client,
        hold_lease(client, service, me, ttl_s=settings.lease_ttl_s, says=lambda: say().needs),
    ):
        feed = Feed(Directory(client, settings.namespace), pool)
        feed.start()
        feed.add(me)
        try:
            await first(_see(feed, me, see), _tell(client, service, me, say, feed), feed.ended())
        finally:
            await feed.stop()


def _changes(use: Use) -> Callable[[Assignment], None]:
    """Return what takes assignments and calls `use` with the teachers of those that have others than the last."""
    mine: tuple[str, ...] | None = None

    def see(assignment: Assignment) -> None:
        nonlocal mine
        if assignment.teachers != mine:
            mine = assignment.teachers
            log.info("teachers.assigned", teachers=mine, students=assignment.students, listed=assignment.listed)
            use(mine)

    return see


async def _see(feed: Feed, me: Member, see: Callable[[Assignment], None]) -> None:
    while True:
        if (assignment := feed.assignment(me.id)) is not None:
            see(assignment)
        await feed.news()


async def _tell(client: Redis, service: keys.Service, me: Member, say: Say, feed: Feed) -> None:
    told = False
    while True:
        reasons = say().quarantined
        feed.avoid(me.id, reasons)
        if reasons or told:
            try:
                await quarantine.publish(client, service.namespace, service.pool, me.id, reasons)
                told = bool(reasons)
            except RegistryUnavailableError:
                pass  # which the watches report; it is told again
        await asyncio.sleep(TELL_EVERY_S)
