"""Who asks whom, by the lists of both roles."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from edl_runtime.balance.assign import assign
from edl_runtime.registry.members import Member


def shares(
    teachers: Collection[Member], students: Collection[Member], avoided: Mapping[str, Collection[str]] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the addresses of each student's teachers, sorted, by the student's id; whoever computes it, alike.

    A student may be listed twice: the later wins. `avoided` has addresses that a student can't use, by its id. One
    whose teachers are all among them gets those too that it would have if they weren't there; its own stay its own, for
    it has to notice when they are good again.
    """
    chosen = _shares(teachers, students)
    for student, bad in (avoided or {}).items():
        mine = chosen.get(student, ())
        if mine and set(mine) <= set(bad):
            others = _shares([teacher for teacher in teachers if teacher.address not in bad], students)
            chosen[student] = tuple(sorted({*mine, *others[student]}))
    return chosen


def _shares(teachers: Collection[Member], students: Collection[Member]) -> dict[str, tuple[str, ...]]:
    addresses = {teacher.id: teacher.address for teacher in teachers}
    chosen = assign(
        {teacher.id: teacher.weight for teacher in teachers}, {student.id: student.want for student in students}
    )
    return {student: tuple(sorted({addresses[teacher] for teacher in chosen[student]})) for student in chosen}
