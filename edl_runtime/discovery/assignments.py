"""Which teachers each student of a pool uses, recomputed when members join or leave; and the JSON messages about it.

A student with access to Redis has a `PoolAssignments` of its own, an endpoint has one for all its students in the pool.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import NoReturn

import msgspec

from edl_runtime.concurrency import first_completed
from edl_runtime.pool_reports import StudentReport
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.members import Member, assign_teachers

REPORT_EVERY_S = 1.0
"""How often both sides send, with or without changes."""

SILENT_AFTER_S = 4.0
"""After so long without a message the student is removed from the pool, and a student reconnects."""


class Assignment(msgspec.Struct, frozen=True):
    """A line of the stream: the addresses of a student's teachers, of `listed` teachers shared by `students`."""

    teachers: tuple[str, ...]
    students: int
    listed: int


class StudentStatus(msgspec.Struct, frozen=True):
    """A student's status: its quarantined teachers, address → reason; and its load, if it reports that."""

    quarantined: dict[str, str] = {}
    needs: StudentReport | None = None


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
