"""Which teachers each student of a pool uses: recomputed when members join or leave, and sent to connected students.

A student with access to Redis has a `StudentRegistry` of its own, an endpoint has one for all its students.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

import msgspec

from edl_runtime.concurrency import first_completed
from edl_runtime.discovery.errors import PoolLimitError
from edl_runtime.pool_reports import StudentReport
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import Lease, hold_lease
from edl_runtime.registry.members import Member, assign_teachers
from edl_runtime.store.keys import Service

if TYPE_CHECKING:
    from redis.asyncio import Redis

REPORT_EVERY_S = 1.0
"""How often both sides send, with or without changes."""

SILENT_AFTER_S = 4.0
"""After so long without a message the student is removed from the pool, and a student reconnects."""


class Assignment(msgspec.Struct, frozen=True):
    """A line of the stream: the addresses of a student's teachers, of `listed` teachers shared by `students`."""

    teachers: tuple[str, ...]
    students: int
    listed: int


# A pool's assignments: two watches in Redis, and at most one computation for each burst of changes.

RECOMPUTE_AFTER_S = 0.05
"""Changes within so short a time are computed together, the first one at once. A longer computation is followed by an
equally long pause, because leases have to be renewed meanwhile."""


class PoolAssignments:
    """The assignments of a pool's students, updated from `start` to `stop`; the owner may count `followers`."""

    def __init__(self, directory: Directory, pool: str) -> None:
        self.followers = 0
        self._directory = directory
        self._pool = pool
        self._running: asyncio.Task[None] | None = None
        self._teachers: Sequence[Member] | None = None
        self._students: Sequence[Member] | None = None
        self._added: dict[str, Member] = {}
        self._avoided: dict[str, frozenset[str]] = {}
        self._shares: dict[str, tuple[str, ...]] = {}
        self._changed = asyncio.Event()
        self._computed = asyncio.Event()

    def start(self) -> None:
        """Start watching the registry."""
        self._running = asyncio.create_task(self._run(), name=f"assignments of {self._pool}")

    async def stop(self) -> None:
        """Stop watching the registry."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def ended(self) -> NoReturn:
        """Wait until watching fails and raise RegistryUnavailableError: Redis was unavailable at the start."""
        if self._running is not None:
            await asyncio.shield(self._running)
        raise RuntimeError("the assignments are not started")

    async def wait_assigned(self, student_id: str) -> None:
        """Wait until the student's teachers are known."""
        while self.assignment(student_id) is None:
            await self.wait_computed()

    def add(self, student: Member) -> None:
        """Include the student, whether or not the registry lists it yet."""
        self._added[student.id] = student
        self._changed.set()

    def remove(self, student: Member) -> None:
        """Include this student only if the registry lists it, unless it has been added again."""
        if self._added.get(student.id) is student:
            del self._added[student.id]
            self.avoid(student.id, ())
            self._changed.set()

    def avoid(self, student_id: str, addresses: Collection[str]) -> None:
        """Set the teachers that the student can't use; it gets others while all of its own are among them."""
        avoided = frozenset(addresses)
        if avoided != self._avoided.get(student_id, frozenset()):
            self._avoided[student_id] = avoided
            if not avoided:
                del self._avoided[student_id]
            self._changed.set()

    def assignment(self, student_id: str) -> Assignment | None:
        """Return the student's latest assignment; None until it is known."""
        mine = self._shares.get(student_id)
        if mine is None or self._teachers is None:
            return None
        return Assignment(mine, students=len(self._shares), listed=len(self._teachers))

    async def wait_computed(self) -> None:
        """Wait for the next computation."""
        await self._computed.wait()

    async def _run(self) -> None:
        await first_completed(self._watch_teachers(), self._watch_students(), self._compute())

    async def _watch_teachers(self) -> None:
        async for teachers in self._directory.watch(self._pool, "teachers"):
            self._teachers = teachers
            self._changed.set()

    async def _watch_students(self) -> None:
        async for students in self._directory.watch(self._pool, "students"):
            self._students = students
            self._changed.set()

    async def _compute(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._teachers is None or self._students is None:
                continue
            begun_s = time.monotonic()
            students = [*self._students, *self._added.values()]
            self._shares = await asyncio.to_thread(assign_teachers, self._teachers, students, dict(self._avoided))
            computed, self._computed = self._computed, asyncio.Event()
            computed.set()
            await asyncio.sleep(max(RECOMPUTE_AFTER_S, time.monotonic() - begun_s))


# The students that are connected, and their pools.


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
        async with (
            self._follow(pool, student) as assignments,
            # The first report is sent with the first renewal; by then there is a session.
            hold_lease(self._client, service, student, ttl_s=self._ttl_s, make_report=lambda: session.report) as lease,
        ):
            session = self._sessions[pool, student.id] = StudentSession(student, assignments, lease, self._closing)
            try:
                yield session
            finally:
                if self._sessions.get((pool, student.id)) is session:
                    del self._sessions[pool, student.id]

    def update(self, pool: str, student_id: str, report: StudentReport) -> bool:
        """Note a student's report, which is sent with its lease; return False when it is not connected."""
        session = self._sessions.get((pool, student_id))
        if session is not None:
            session.note_report(report)
        return session is not None

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
    """A connected student of a pool. `report`: its last one."""

    def __init__(self, student: Member, pool: PoolAssignments, lease: Lease, closing: asyncio.Event) -> None:
        self.pool = pool
        self.report: StudentReport | None = None
        self._student = student
        self._lease = lease
        self._closing = closing
        self._seen_at = asyncio.get_running_loop().time()
        pool.avoid(student.id, ())  # what an earlier session could not use

    def note_report(self, report: StudentReport) -> None:
        """Note that the student is alive, what it reports, and which teachers it can't use."""
        self._seen_at = asyncio.get_running_loop().time()
        self.report = report
        self.pool.avoid(self._student.id, report.quarantined)

    async def assignments(self) -> AsyncGenerator[Assignment, None]:
        """Yield the student's teachers at once, after each change, and every `REPORT_EVERY_S`."""
        while True:
            sent = self.pool.assignment(self._student.id)
            if sent is not None:
                yield sent
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):
                    await self._wait_for_other_teachers(sent)

    async def wait_until_closed(self) -> str:
        """Wait until the session has to end and return why."""
        return await first_completed(self._status_timeout(), self._rejection(), self._close(), self.pool.ended())

    async def _wait_for_other_teachers(self, sent: Assignment | None) -> None:
        while True:
            await self.pool.wait_computed()
            now = self.pool.assignment(self._student.id)
            if now is not None and (sent is None or now.teachers != sent.teachers):
                return

    async def _status_timeout(self) -> str:
        loop = asyncio.get_running_loop()
        while (rest_s := self._seen_at + SILENT_AFTER_S - loop.time()) > 0:  # noqa: ASYNC110 - a report puts it off
            await asyncio.sleep(rest_s)
        return f"it sent no status for {SILENT_AFTER_S:.0f} s"

    async def _rejection(self) -> str:
        return str(await self._lease.wait_rejected())

    async def _close(self) -> str:
        await self._closing.wait()
        return "the endpoint stops"
