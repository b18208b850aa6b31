"""A pool as people and programs are shown it: by `edl pools` and by the discovery endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.errors import UnknownPoolError
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.registry import quarantine
from edl_runtime.registry.demands import demands
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.members import Member
from edl_runtime.registry.quarantine import Quarantine

if TYPE_CHECKING:
    from redis.asyncio import Redis


class TeacherView(msgspec.Struct, frozen=True, kw_only=True):
    """A registered teacher; `quarantine` is None while every student asks it.

    `report` is how busy it is, None if it does not say.
    """

    id: str
    address: str
    weight: float
    fence: int
    quarantine: Quarantine | None
    report: TeacherReport | None = None


class StudentView(msgspec.Struct, frozen=True, kw_only=True):
    """A registered student; `want` is the most teachers it can use, None for all.

    `report` is what it has of the teachers and how long it waits for them, None if it does not say.
    """

    id: str
    address: str
    want: int | None
    fence: int
    report: StudentReport | None = None


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A pool and its members, by id; `model` is None while it has no teachers."""

    name: str
    model: ModelSignature | None
    teachers: tuple[TeacherView, ...]
    students: tuple[StudentView, ...]

    @property
    def quarantined(self) -> int:
        """How many of its teachers are in somebody's quarantine."""
        return sum(teacher.quarantine is not None for teacher in self.teachers)

    @property
    def demand(self) -> PoolDemand:
        """What its members report."""
        return PoolDemand(
            teachers={teacher.id: teacher.report for teacher in self.teachers},
            students={student.id: student.report for student in self.students},
        )


async def view_pools(client: Redis, namespace: str) -> list[PoolView]:
    """Return all pools that have members, by name. Raises RegistryUnavailableError."""
    return [await _view(client, namespace, pool) for pool in await Directory(client, namespace).pools()]


async def view_pool(client: Redis, namespace: str, name: str) -> PoolView:
    """Return that pool. Raises UnknownPoolError when it has no members, RegistryUnavailableError."""
    known = await Directory(client, namespace).pools()
    if name not in known:
        raise UnknownPoolError(name, namespace, known)
    return await _view(client, namespace, name)


async def _view(client: Redis, namespace: str, pool: str) -> PoolView:
    directory = Directory(client, namespace)
    students = await directory.members(pool, "students")
    said = (await demands(client, namespace, [pool]))[pool]
    return PoolView(
        name=pool,
        model=await directory.contract(pool),
        teachers=_teachers(
            await directory.members(pool, "teachers"),
            await quarantine.read(client, namespace, pool, [student.id for student in students]),
            said,
        ),
        students=tuple(
            StudentView(
                id=student.id,
                address=student.address,
                want=student.want,
                fence=student.fence,
                report=said.students.get(student.id),
            )
            for student in students
        ),
    )


def _teachers(
    members: Sequence[Member], quarantined: dict[str, Quarantine], said: PoolDemand
) -> tuple[TeacherView, ...]:
    return tuple(
        TeacherView(
            id=member.id,
            address=member.address,
            weight=member.weight,
            fence=member.fence,
            quarantine=quarantined.get(member.address),
            report=said.teachers.get(member.id),
        )
        for member in members
    )
