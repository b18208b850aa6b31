"""How many teachers a pool needs: a pure function of its members' reports.

The demand of a student is what it would ask if it never waited, `asked / (1 - waiting)` teachers at a time, scaled to
the busy time that teachers report. Students have even shares of the teachers (see `edl_runtime.balance`), so a pool is
large enough when an even share meets each student's demand.

- It grows while a student waits for at least WAITING_THRESHOLD of its time, to where demands are met. That is an
  estimate from teachers that were all busy, so it at most doubles at a time.
- It shrinks while no student waits, to the fewest that are busy for at most SHRINK_UTILISATION.
- Otherwise it stays; also while reports are missing, or are about other teachers than the current ones.

Repeated, it settles: the size at which no student waits is within the two bounds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Self

import msgspec

from edl_runtime.balance.assign import most_sharing
from edl_runtime.meter import WINDOW_S
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport
from edl_runtime.specs import Bounds

WAITING_THRESHOLD = 0.05
"""A student that waits for at least this share of its time needs more teachers."""
GROW_UTILISATION = 0.95
"""Target utilisation of teachers when a pool grows."""
SHRINK_UTILISATION = 0.8
"""Target utilisation of teachers when a pool shrinks."""
SETTLED_S = WINDOW_S + 1.0
"""This long after a member came or left, all reports are about the current members."""
MIN_REPORT_S = 0.9 * WINDOW_S
"""Reports about a shorter time are of a member that has only just joined."""
MIN_OWN_SHARE = 0.01
"""The least share of its time that a student counts as working: one that only waits has no finite demand."""


class PoolSize(msgspec.Struct, frozen=True):
    """How many teachers a pool should have, and why."""

    teachers: int
    reason: str


def pool_size(teachers: int, demand: PoolDemand, bounds: Bounds) -> PoolSize:
    """Return the fewest teachers with which the pool's students run at full speed, within `bounds`.

    `teachers`: the pool's requested instances, 0 while it is suspended. Further registered teachers were started by
    others; they share the work, and stay. A teacher without reports counts by what its students report of it.
    """
    need = _needed(teachers, demand, bounds.max) if demand.students else PoolSize(bounds.min, "it has no students")
    within = min(max(need.teachers, bounds.min), bounds.max)
    if within == need.teachers:
        return need
    return PoolSize(within, f"{need.reason}; its {'minimum' if within == bounds.min else 'maximum'} is {within}")


def describe_limit(demand: PoolDemand) -> str:
    """Return in words whether the pool's students wait for its teachers, and how many more would end it."""
    there = len(demand.teachers)
    if not demand.students:
        return "it has no students"
    if not there:
        return "no teacher is registered; its students wait"
    if unsettled := _unsettled(there, demand):
        return f"not known yet: {unsettled}"
    load = _Load.of(demand)
    enough = load.enough(at_most=2 * there + 1)  # an estimate from teachers that are all busy reaches no further
    waits = f"students wait {_percent(load.waiting)} of the time for teachers"
    if not load.waits:
        fewer = f"; {there - enough} fewer would do" if enough < there else ""
        return f"students do not wait; teachers are busy {_percent(load.busy / there)} of the time{fewer}"
    if enough > there:
        more = f"at least {there} more are needed" if enough > 2 * there else f"{enough - there} more would end it"
        return f"{waits}; {more}"
    return f"{waits}, which are busy {_percent(load.busy / there)} of it; more would not help"


def even_shares(teachers: int, wants: Sequence[int | None]) -> list[float]:
    """Return the guaranteed share of each student, by the most teachers that it wants."""
    even, left = 0.0, teachers
    by_want = sorted(math.inf if want is None else want for want in wants)
    for place, want in enumerate(by_want):
        sharers = len(wants) - place
        own, shared = divmod(left, sharers)
        students = math.ceil(sharers / shared) if shared else math.inf
        even = own + (1 / students if students <= most_sharing(own) else 0)
        if want > own:
            break
        left -= int(want)
    return [even if want is None else min(even, want) for want in wants]


def _needed(teachers: int, demand: PoolDemand, most: int) -> PoolSize:
    if unsettled := _unsettled(teachers, demand):
        return PoolSize(teachers, unsettled)
    load, there = _Load.of(demand), len(demand.teachers)
    others = there - teachers
    state = f"students wait {_percent(load.waiting)} of the time, teachers are busy {_percent(load.busy / there)}"
    enough = load.enough(at_most=max(most + others, there))
    if load.waits:
        if enough > 2 * there:
            return PoolSize(2 * there - others, f"{state}: {enough} could do what they ask, and it at most doubles")
        if enough > there:
            return PoolSize(enough - others, f"{state}: {enough} could do what they ask")
        return PoolSize(teachers, f"{state}; more would have too little to do")
    if enough < there:
        return PoolSize(max(enough - others, 0), f"{state}: {enough} could do what they ask, with room to spare")
    return PoolSize(teachers, state)


class _Load(NamedTuple):
    """What a pool's students do: how many teachers are `busy` at a time, and the longest share of `waiting`."""

    students: list[StudentReport]
    busy: float
    waiting: float

    @classmethod
    def of(cls, demand: PoolDemand) -> Self:
        """Return the load by the reports of a pool with students and teachers."""
        students = [report for report in demand.students.values() if report is not None]
        busy = _busy(list(demand.teachers.values()), students)
        return cls(students, busy, max(student.waiting for student in students))

    @property
    def waits(self) -> bool:
        """Whether a student waits for so long that it needs more teachers."""
        return self.waiting >= WAITING_THRESHOLD

    def enough(self, *, at_most: int) -> int:
        """Return how many teachers, `at_most` so many, the students need: while none waits, with room to spare."""
        if self.waits:
            return _enough(self.students, self.busy, GROW_UTILISATION, at_most=at_most)
        fewest = _enough(self.students, self.busy, SHRINK_UTILISATION, at_most=at_most)
        return max(fewest, math.ceil(self.busy / SHRINK_UTILISATION))


def _unsettled(teachers: int, demand: PoolDemand) -> str:
    """Return why the reports can't be used for so many teachers; empty if they can."""
    registered, students = len(demand.teachers), demand.students.values()
    if not registered or registered < teachers:
        return f"{registered} of its teachers are registered"
    if silent := sum(report is None for report in students):
        return f"{silent} of {len(students)} students have reported nothing of late"
    if paused := sum(report is not None and report.pauses for report in students):
        return f"{paused} of {len(students)} students have paused a moment ago"
    reports = (*demand.teachers.values(), *students)
    if demand.settled_s < SETTLED_S or any(report is not None and report.over_s < MIN_REPORT_S for report in reports):
        return f"its members have worked together for less than {WINDOW_S:g} s"
    return ""


def _busy(loads: Sequence[TeacherReport | None], students: Sequence[StudentReport]) -> float:
    """Return how many teachers are busy at a time. Those without a report count by their students' reports."""
    known = [load.busy for load in loads if load is not None]
    unknown = len(loads) - len(known)
    seen = min(1.0, sum(student.asked for student in students) / len(loads))
    return sum(known) + unknown * seen


def _enough(students: Sequence[StudentReport], busy: float, fill: float, *, at_most: int) -> int:
    """Return the fewest teachers, `at_most` so many, that meet all demands at a utilisation of `fill`.

    `busy`: how many are busy now. What students ask beyond that is network time, and waiting for others' requests.
    """
    asked = sum(student.asked for student in students)
    worked = min(1.0, busy / asked) if asked else 0.0
    wants = [student.want for student in students]
    demands = [student.asked * worked / max(1 - student.waiting, MIN_OWN_SHARE) / fill for student in students]

    def suffices(teachers: int) -> bool:
        shares = even_shares(teachers, wants)
        return all(
            share >= demand or share == student.want
            for share, demand, student in zip(shares, demands, students, strict=True)
        )

    return 1 + bisect_left(range(1, at_most), True, key=suffices)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
