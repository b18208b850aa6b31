"""How many teachers a pool needs: a pure function of what its members report.

A student that waited for none of its batches would ask `asked / (1 - waiting)` teachers at a time: that is its demand,
and what it asks of teachers that answer others, too, is scaled to what these say they work. Students have even shares
of the teachers (see `edl_runtime.balance`), so the pool has enough when an even share is enough for each student.

- It grows only while a student waits for at least `WAITS` of its time: to where each would be given its demand. That is
  an estimate, from teachers that were all busy, so it at most doubles; if a student still waits then, it grows on.
- It shrinks only while no student waits, to as few as carry the demand with `ROOM` to spare.
- Between the two it stays; so it does while reports are missing, or tell of other teachers than there are now.

Applied again and again it comes to rest, for the size at which nobody waits leaves less than that room below it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from edl_runtime.balance.assign import most_sharing
from edl_runtime.meter import WINDOW_S
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport
from edl_runtime.specs import Bounds

WAITING_THRESHOLD = 0.05
"""Share of its time from which on a student's waits for teachers count: without them it would be a twentieth faster."""
GROW_UTILISATION = 0.95
"""How busy teachers may be, by the estimate, in a pool that grows."""
SHRINK_UTILISATION = 0.8
"""How busy teachers may be, by the estimate, in a pool that shrinks."""
SETTLED_S = WINDOW_S + 1.0
"""So long after somebody came or went, all reports are about those that are there now."""
MIN_REPORT_S = 0.9 * WINDOW_S
"""Reports that look back less far are of one that has only just found the others."""
MIN_OWN_SHARE = 0.01
"""The least share of its time that a student is taken to work itself, for one that only waits asks for no number."""


class PoolSize(msgspec.Struct, frozen=True):
    """How many teachers a pool should have, and why, in words."""

    teachers: int
    reason: str


def pool_size(teachers: int, demand: PoolDemand, bounds: Bounds) -> PoolSize:
    """Return how many teachers let the pool's students run as fast as they can, and no more, within `bounds`.

    `teachers`: how many instances the pool is to have now, 0 while it is suspended. Registered ones beyond that are
    somebody else's: they carry their part, and stay. A teacher that reports nothing, as a server of another make,
    counts by what its students see of it.
    """
    need = _needed(teachers, demand, bounds.max) if demand.students else PoolSize(bounds.min, "it has no students")
    within = min(max(need.teachers, bounds.min), bounds.max)
    if within == need.teachers:
        return need
    return PoolSize(within, f"{need.reason}; its {'minimum' if within == bounds.min else 'maximum'} is {within}")


def even_shares(teachers: int, wants: Sequence[int | None]) -> list[float]:
    """Return what each student is sure to have of so many teachers, by what it wants at most."""
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
    students = [report for report in demand.students.values() if report is not None]
    busy = _busy(list(demand.teachers.values()), students)
    there = len(demand.teachers)
    others = there - teachers
    waiting = max(student.waiting for student in students)
    state = f"students wait {_percent(waiting)} of the time, teachers are busy {_percent(busy / there)}"
    if waiting >= WAITING_THRESHOLD:
        enough = _enough(students, busy, GROW_UTILISATION, at_most=max(most + others, there))
        if enough > 2 * there:
            return PoolSize(2 * there - others, f"{state}: {enough} could do what they ask, and it at most doubles")
        if enough > there:
            return PoolSize(enough - others, f"{state}: {enough} could do what they ask")
        return PoolSize(teachers, f"{state}; more would have too little to do")
    enough = max(_enough(students, busy, SHRINK_UTILISATION, at_most=there), math.ceil(busy / SHRINK_UTILISATION))
    if enough < there:
        return PoolSize(max(enough - others, 0), f"{state}: {enough} could do what they ask, with room to spare")
    return PoolSize(teachers, state)


def _unsettled(teachers: int, demand: PoolDemand) -> str:
    """Return in words why the reports tell nothing about so many teachers; empty if they do."""
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
    """Return how many teachers are busy at a time; those that don't say count as the students see all of them."""
    said = [load.busy for load in loads if load is not None]
    silent = len(loads) - len(said)
    seen = min(1.0, sum(student.asked for student in students) / len(loads))
    return sum(said) + silent * seen


def _enough(students: Sequence[StudentReport], busy: float, fill: float, *, at_most: int) -> int:
    """Return the fewest teachers, `at_most` so many, that are busy for up to `fill` when each student has its demand.

    `busy`: how many are at a time now. What students ask beyond that is the way there and back, and others' turns.
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
