"""Which teachers each student of a pool uses, recomputed as members come and go; and its JSON messages.

A student on Redis has one `PoolAssignments` for itself, an endpoint has one for all of its students in the pool.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

import msgspec

from edl_runtime.concurrency import first_completed
from edl_runtime.pool_reports import StudentReport
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.members import Member, assign_teachers
from edl_runtime.store.keys import Role

REPORT_EVERY_S = 1.0
"""How often both sides speak, news or not."""

SILENT_AFTER_S = 4.0
"""Who says nothing for so long counts as gone: the student leaves the pool, the endpoint is tried anew."""


class Assignment(msgspec.Struct, frozen=True):
    """A line of the stream: the addresses of a student's teachers, of so many `listed` among so many `students`."""

    teachers: tuple[str, ...]
    students: int
    listed: int


class StudentStatus(msgspec.Struct, frozen=True):
    """What a student says: which teachers it keeps in quarantine, address → why; and what it needs, if it says."""

    quarantined: dict[str, str] = {}
    needs: StudentReport | None = None


# A pool as its students see it: two watches in Redis and one computation, at most, for each burst of changes.

RECOMPUTE_AFTER_S = 0.05
"""Changes that come within so short a time are computed together; the first of them is not kept waiting. Where the
computation takes longer than that, it rests for as long again, for leases have to be renewed meanwhile."""


class PoolAssignments:
    """The shares of a pool's students, kept up from `start` to `stop`; `followers` is for who counts them."""

    def __init__(self, directory: Directory, pool: str) -> None:
        self.followers = 0
        self._directory = directory
        self._pool = pool
        self._running: asyncio.Task[None] | None = None
        self._teachers: Sequence[Member] | None = None
        self._students: Sequence[Member] | None = None
        self._here: dict[str, Member] = {}
        self._avoided: dict[str, frozenset[str]] = {}
        self._shares: dict[str, tuple[str, ...]] = {}
        self._changed = asyncio.Event()
        self._computed = asyncio.Event()

    def start(self) -> None:
        """Follow the registry from now on."""
        self._running = asyncio.create_task(self._run(), name=f"feed of {self._pool}")

    async def stop(self) -> None:
        """Leave the registry's news alone and return when it does."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def ended(self) -> NoReturn:
        """Wait until the registry can't be followed and raise why: RegistryUnavailableError, away at the start."""
        if self._running is not None:
            await asyncio.shield(self._running)
        raise RuntimeError("this feed is not running")

    async def knows(self, student_id: str) -> None:
        """Wait until the student's teachers are known."""
        while self.assignment(student_id) is None:
            await self.news()

    def add(self, student: Member) -> None:
        """Count the student in, whether or not the registry lists it yet."""
        self._here[student.id] = student
        self._changed.set()

    def remove(self, student: Member) -> None:
        """Count on the registry alone for this student, unless it has been added anew."""
        if self._here.get(student.id) is student:
            del self._here[student.id]
            self.avoid(student.id, ())
            self._changed.set()

    def avoid(self, student_id: str, addresses: Collection[str]) -> None:
        """Find the student other teachers for as long as all of its own are among these, which it can't use."""
        avoided = frozenset(addresses)
        if avoided != self._avoided.get(student_id, frozenset()):
            self._avoided[student_id] = avoided
            if not avoided:
                del self._avoided[student_id]
            self._changed.set()

    def assignment(self, student_id: str) -> Assignment | None:
        """Return what a student's teachers are by the latest news; None until that is known."""
        mine = self._shares.get(student_id)
        if mine is None or self._teachers is None:
            return None
        return Assignment(mine, students=len(self._shares), listed=len(self._teachers))

    async def news(self) -> None:
        """Wait until shares have been computed again."""
        await self._computed.wait()

    async def _run(self) -> None:
        teachers = self._watch("teachers", self._update_teachers)
        students = self._watch("students", self._update_students)
        await first_completed(teachers, students, self._compute())

    async def _watch(self, role: Role, see: Callable[[Sequence[Member]], None]) -> None:
        async for members in self._directory.watch(self._pool, role):
            see(members)
            self._changed.set()

    def _update_teachers(self, teachers: Sequence[Member]) -> None:
        self._teachers = teachers

    def _update_students(self, students: Sequence[Member]) -> None:
        self._students = students

    async def _compute(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._teachers is None or self._students is None:
                continue
            begun_s = time.monotonic()
            students = [*self._students, *self._here.values()]
            self._shares = await asyncio.to_thread(assign_teachers, self._teachers, students, dict(self._avoided))
            computed, self._computed = self._computed, asyncio.Event()
            computed.set()
            await asyncio.sleep(max(RECOMPUTE_AFTER_S, time.monotonic() - begun_s))
