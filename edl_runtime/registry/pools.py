"""Pools: their members, and the load that these report."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from edl_runtime.errors import counted, one_line
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.registry.directory import Directory, PoolMembers
from edl_runtime.registry.errors import UnknownPoolError
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import readable, run_script_on_each

if TYPE_CHECKING:
    from redis.asyncio import Redis

STALE_AFTER_S = 5.0
"""Older reports are ignored: the member renews its lease but does not report."""

Report = TypeVar("Report", TeacherReport, StudentReport)

log = get_logger(__name__)

# Made while one thread imports this: msgspec crashes when several threads are the first to decode a type.
_teacher_decoder = JsonDecoder(TeacherReport)
_student_decoder = JsonDecoder(StudentReport)


async def read_demands(client: Redis, namespace: str, pools: Sequence[str]) -> dict[str, PoolDemand]:
    """Return the reports of these pools' members, in one or two round trips for all pools together.

    A pool without members has no reports. Raises MalformedRecordError, RegistryUnavailableError.
    """
    return {pool: readable(one) for pool, one in (await read_each_demand(client, namespace, pools)).items()}


async def read_each_demand(
    client: Redis, namespace: str, pools: Sequence[str]
) -> dict[str, PoolDemand | MalformedRecordError]:
    """As `read_demands`, with the error in place of the reports of a pool that can't be read."""
    services = [Service(namespace, pool, role) for pool in pools for role in keys.ROLES]
    answers = await run_script_on_each(client, "reports", [keys.service_keys(service) for service in services])
    return {
        pool: next((one for one in both if isinstance(one, MalformedRecordError)), None) or _demand(*both)
        for pool, both in zip(pools, zip(answers[::2], answers[1::2], strict=True), strict=True)
    }


def _demand(teachers: Any, students: Any) -> PoolDemand:
    return PoolDemand(
        teachers=_reports(teachers, _teacher_decoder),
        students=_reports(students, _student_decoder),
        settled_s=min(_settled_s(teachers), _settled_s(students)),
    )


def _reports(answer: Any, decoder: JsonDecoder[Report]) -> dict[str, Report | None]:
    now_ms, _, ids, reports = answer
    by_member = sorted(zip(ids, reports, strict=True))
    return {member: _report(member, text, now_ms / 1000, decoder) for member, text in by_member}


def _settled_s(answer: Any) -> float:
    _, settled_ms, *_ = answer
    return settled_ms / 1000 if settled_ms >= 0 else math.inf


def _report(member: str, text: str, now_s: float, decoder: JsonDecoder[Report]) -> Report | None:
    if not text:
        return None
    try:
        at = _at_decoder.decode(text).at
        return decoder.decode(text) if now_s - at <= STALE_AFTER_S else None
    except msgspec.DecodeError as error:
        log.warning("report.unreadable", member=member, report=text[:200], cause=str(error))
        return None


class _At(msgspec.Struct):
    at: float


_at_decoder = JsonDecoder(_At)


# A pool as `edl pools` and the discovery endpoint show it.


class Quarantine(msgspec.Struct, frozen=True):
    """The most frequent reason why students have quarantined a teacher, and how many students have."""

    reason: str
    students: int

    def __str__(self) -> str:
        return f"{one_line(self.reason)} (by {counted(self.students, 'student')})"


class TeacherInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A registered teacher; `quarantine` is None while all students use it, `report` if it has not reported."""

    id: str
    address: str
    weight: float
    fence: int
    quarantine: Quarantine | None
    report: TeacherReport | None = None


class StudentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A registered student; `want` is the most teachers it can use, None for all; `report` its last one, if any."""

    id: str
    address: str
    want: int | None
    fence: int
    report: StudentReport | None = None


class PoolInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A pool and its members, by id; `model` is None while it has no teachers.

    `problem`: why the pool can't be read, empty if it can; it then shows no members.
    """

    name: str
    model: ModelSignature | None = None
    teachers: tuple[TeacherInfo, ...] = ()
    students: tuple[StudentInfo, ...] = ()
    problem: str = ""

    @property
    def quarantined(self) -> int:
        """How many of its teachers are quarantined by any student."""
        return sum(teacher.quarantine is not None for teacher in self.teachers)

    @property
    def demand(self) -> PoolDemand:
        """Its members' reports."""
        return PoolDemand(
            teachers={teacher.id: teacher.report for teacher in self.teachers},
            students={student.id: student.report for student in self.students},
        )


async def list_pools(client: Redis, namespace: str) -> list[PoolInfo]:
    """Return all pools that have members, by name, in few round trips for all. Raises RegistryUnavailableError."""
    members = await Directory(client, namespace).members_of_pools()
    demands = await read_each_demand(client, namespace, list(members))
    found = []
    for name, there in members.items():
        try:
            found.append(_pool_info(name, readable(there), readable(demands[name])))
        except MalformedRecordError as error:
            found.append(PoolInfo(name=name, problem=str(error)))
    return found


async def get_pool(client: Redis, namespace: str, name: str) -> PoolInfo:
    """Return that pool.

    Raises UnknownPoolError when it has no members, MalformedRecordError, RegistryUnavailableError.
    """
    members = await Directory(client, namespace).members_of_pools()
    if name not in members:
        raise UnknownPoolError(name, namespace, list(members))
    return _pool_info(name, readable(members[name]), (await read_demands(client, namespace, [name]))[name])


def _pool_info(pool: str, members: PoolMembers, demand: PoolDemand) -> PoolInfo:
    quarantined = _quarantined(demand.students)
    return PoolInfo(
        name=pool,
        model=members.model,
        teachers=tuple(
            TeacherInfo(
                id=member.id,
                address=member.address,
                weight=member.weight,
                fence=member.fence,
                quarantine=quarantined.get(member.address),
                report=demand.teachers.get(member.id),
            )
            for member in members.teachers
        ),
        students=tuple(
            StudentInfo(
                id=member.id,
                address=member.address,
                want=member.want,
                fence=member.fence,
                report=demand.students.get(member.id),
            )
            for member in members.students
        ),
    )


def _quarantined(students: Mapping[str, StudentReport | None]) -> dict[str, Quarantine]:
    """Return the teachers that students have quarantined, by address."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for report in students.values():
        for address, reason in report.quarantined.items() if report else ():
            reasons[address].append(reason)
    return {address: Quarantine(Counter(its).most_common(1)[0][0], len(its)) for address, its in reasons.items()}
