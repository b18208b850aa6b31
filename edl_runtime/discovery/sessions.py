"""The students that are connected to a discovery endpoint, and the pools that they follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from edl_runtime.concurrency import first_completed
from edl_runtime.discovery.assignments import REPORT_EVERY_S, SILENT_AFTER_S, Assignment, PoolAssignments, StudentStatus
from edl_runtime.discovery.errors import PoolLimitError
from edl_runtime.log import get_logger
from edl_runtime.pool_reports import StudentReport
from edl_runtime.registry import quarantine
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import Lease, hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.keys import Service

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = get_logger(__name__)


class StudentRegistry:
    """Keeps connected students registered, each for as long as its block lasts.

    All students of a pool share one watch of its teachers and one of its students, which end with the last of them.
    Students of `most_pools` may be connected at once.
    """

    def __init__(self, client: Redis, namespace: str, *, ttl_s: float, most_pools: int) -> None:
        self._client = client
        self._namespace = namespace
        self._ttl_s = ttl_s
        self._most_pools = most_pools
        self._closing = asyncio.Event()
        self._feeds: dict[str, PoolAssignments] = {}
        self._connected: dict[tuple[str, str], StudentSession] = {}

    @asynccontextmanager
    async def connect(self, pool: str, student: Member) -> AsyncIterator[StudentSession]:
        """Be that student of the pool in the block, in place of an earlier one of the same id.

        Raises RegistryUnavailableError when Redis is away at the start, PoolLimitError when there are as many pools.
        """
        service = Service(self._namespace, pool, "students")

        def needs() -> StudentReport | None:
            return said.needs if (said := self._connected.get((pool, student.id))) else None

        async with (
            self._follow(pool, student) as feed,
            hold_lease(self._client, service, student, ttl_s=self._ttl_s, says=needs) as lease,
        ):
            one = self._connected[pool, student.id] = StudentSession(student, feed, lease, self._closing)
            log.info("student.connected", pool=pool, student=student.id, connected=len(self._connected))
            try:
                yield one
            finally:
                if self._connected.get((pool, student.id)) is one:
                    del self._connected[pool, student.id]

    async def update(self, pool: str, student_id: str, said: StudentStatus) -> bool:
        """Take in what a student says; return False when it is not connected. What it needs goes with its lease."""
        one = self._connected.get((pool, student_id))
        if one is None:
            return False
        one.hear(said.quarantined)
        one.needs = said.needs
        if said.quarantined or one.has_quarantined:
            with suppress(RegistryUnavailableError):  # the student will say it again
                await quarantine.publish_quarantine(self._client, self._namespace, pool, student_id, said.quarantined)
                one.has_quarantined = bool(said.quarantined)
        return True

    def close(self) -> None:
        """Tell all that are connected to end, and those who come."""
        self._closing.set()

    @asynccontextmanager
    async def _follow(self, pool: str, student: Member) -> AsyncIterator[PoolAssignments]:
        feed = self._feeds.get(pool)
        if feed is None:
            if len(self._feeds) >= self._most_pools:
                raise PoolLimitError(pool, self._most_pools)
            feed = self._feeds[pool] = PoolAssignments(Directory(self._client, self._namespace), pool)
            feed.start()
        feed.followers += 1
        feed.add(student)
        try:
            await first_completed(feed.knows(student.id), feed.ended())
            yield feed
        finally:
            feed.remove(student)
            feed.followers -= 1
            if not feed.followers:
                del self._feeds[pool]
                await feed.stop()


class StudentSession:
    """A student that is connected. `has_quarantined` is whether it may have told others of teachers in quarantine.

    `needs` is what it last said about that.
    """

    def __init__(self, student: Member, feed: PoolAssignments, lease: Lease, closing: asyncio.Event) -> None:
        self.has_quarantined = True  # in an earlier stream
        self.needs: StudentReport | None = None
        self._student = student
        self._feed = feed
        self._lease = lease
        self._closing = closing
        self.hear({})

    def hear(self, quarantined: Mapping[str, str]) -> None:
        """Note a sign of life, and which teachers the student can't use."""
        self._heard_at = asyncio.get_running_loop().time()
        self._feed.avoid(self._student.id, quarantined)

    async def assignments(self) -> AsyncGenerator[Assignment, None]:
        """Yield the student's teachers at once, as soon as they change, and every `REPORT_EVERY_S`; for ever."""
        while True:
            said = self._feed.assignment(self._student.id)
            if said is not None:
                yield said
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):
                    await self._wait_for_other_teachers(said)

    async def wait_until_closed(self) -> str:
        """Wait until the student has to be let go and return why."""
        return await first_completed(self._silence(), self._refusal(), self._close(), self._feed.ended())

    async def _wait_for_other_teachers(self, said: Assignment | None) -> None:
        while True:
            await self._feed.news()
            now = self._feed.assignment(self._student.id)
            if now is not None and (said is None or now.teachers != said.teachers):
                return

    async def _silence(self) -> str:
        loop = asyncio.get_running_loop()
        while (rest_s := self._heard_at + SILENT_AFTER_S - loop.time()) > 0:  # noqa: ASYNC110 - it may be heard of
            await asyncio.sleep(rest_s)
        return f"it said nothing for {SILENT_AFTER_S:.0f} s"

    async def _refusal(self) -> str:
        return str(await self._lease.refused())

    async def _close(self) -> str:
        await self._closing.wait()
        return "the endpoint stops"
