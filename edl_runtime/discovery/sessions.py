"""The students that are connected to a discovery endpoint, and their pools."""

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
    """Keeps connected students registered.

    All students of a pool share one `PoolAssignments`, which ends with the last of them. Students of at most
    `most_pools` pools may be connected at once.
    """

    def __init__(self, client: Redis, namespace: str, *, ttl_s: float, most_pools: int) -> None:
        self._client = client
        self._namespace = namespace
        self._ttl_s = ttl_s
        self._most_pools = most_pools
        self._closing = asyncio.Event()
        self._pools: dict[str, PoolAssignments] = {}
        self._sessions: dict[tuple[str, str], StudentSession] = {}

    @asynccontextmanager
    async def connect(self, pool: str, student: Member) -> AsyncIterator[StudentSession]:
        """Register the student in the block; replaces an earlier session of the same id.

        Raises RegistryUnavailableError when Redis is unavailable at the start, PoolLimitError beyond `most_pools`.
        """
        service = Service(self._namespace, pool, "students")

        def make_report() -> StudentReport | None:
            session = self._sessions.get((pool, student.id))
            return session.report if session else None

        async with (
            self._follow(pool, student) as assignments,
            hold_lease(self._client, service, student, ttl_s=self._ttl_s, make_report=make_report) as lease,
        ):
            session = self._sessions[pool, student.id] = StudentSession(student, assignments, lease, self._closing)
            log.info("student.connected", pool=pool, student=student.id, connected=len(self._sessions))
            try:
                yield session
            finally:
                if self._sessions.get((pool, student.id)) is session:
                    del self._sessions[pool, student.id]

    async def update(self, pool: str, student_id: str, status: StudentStatus) -> bool:
        """Store a student's status; return False when it is not connected. Its load is reported with its lease."""
        session = self._sessions.get((pool, student_id))
        if session is None:
            return False
        session.note_status(status.quarantined)
        session.report = status.needs
        if status.quarantined or session.has_quarantined:
            with suppress(RegistryUnavailableError):  # the student sends it again
                await quarantine.publish_quarantine(self._client, self._namespace, pool, student_id, status.quarantined)
                session.has_quarantined = bool(status.quarantined)
        return True

    def close(self) -> None:
        """End all sessions, and new ones at once."""
        self._closing.set()

    @asynccontextmanager
    async def _follow(self, pool: str, student: Member) -> AsyncIterator[PoolAssignments]:
        assignments = self._pools.get(pool)
        if assignments is None:
            if len(self._pools) >= self._most_pools:
                raise PoolLimitError(pool, self._most_pools)
            assignments = self._pools[pool] = PoolAssignments(Directory(self._client, self._namespace), pool)
            assignments.start()
        assignments.followers += 1
        assignments.add(student)
        try:
            await first_completed(assignments.wait_assigned(student.id), assignments.ended())
            yield assignments
        finally:
            assignments.remove(student)
            assignments.followers -= 1
            if not assignments.followers:
                del self._pools[pool]
                await assignments.stop()


class StudentSession:
    """A connected student. `has_quarantined`: it may have published quarantined teachers. `report`: its last one."""

    def __init__(self, student: Member, assignments: PoolAssignments, lease: Lease, closing: asyncio.Event) -> None:
        self.has_quarantined = True  # in an earlier stream
        self.report: StudentReport | None = None
        self._student = student
        self._assignments = assignments
        self._lease = lease
        self._closing = closing
        self.note_status({})

    def note_status(self, quarantined: Mapping[str, str]) -> None:
        """Note that the student is alive, and which teachers it can't use."""
        self._seen_at = asyncio.get_running_loop().time()
        self._assignments.avoid(self._student.id, quarantined)

    async def assignments(self) -> AsyncGenerator[Assignment, None]:
        """Yield the student's teachers at once, after each change, and every `REPORT_EVERY_S`."""
        while True:
            sent = self._assignments.assignment(self._student.id)
            if sent is not None:
                yield sent
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):
                    await self._wait_for_other_teachers(sent)

    async def wait_until_closed(self) -> str:
        """Wait until the session has to end and return why."""
        return await first_completed(
            self._status_timeout(), self._rejection(), self._close(), self._assignments.ended()
        )

    async def _wait_for_other_teachers(self, sent: Assignment | None) -> None:
        while True:
            await self._assignments.wait_computed()
            now = self._assignments.assignment(self._student.id)
            if now is not None and (sent is None or now.teachers != sent.teachers):
                return

    async def _status_timeout(self) -> str:
        loop = asyncio.get_running_loop()
        while (rest_s := self._seen_at + SILENT_AFTER_S - loop.time()) > 0:  # noqa: ASYNC110 - a status puts it off
            await asyncio.sleep(rest_s)
        return f"it sent no status for {SILENT_AFTER_S:.0f} s"

    async def _rejection(self) -> str:
        return str(await self._lease.wait_rejected())

    async def _close(self) -> str:
        await self._closing.wait()
        return "the endpoint stops"
