"""Who asks whom, by the lists of both roles."""

from __future__ import annotations

from collections.abc import Collection

from edl_runtime.balance.assign import assign
from edl_runtime.registry.members import Member


def shares(teachers: Collection[Member], students: Collection[Member]) -> dict[str, tuple[str, ...]]:
    """Return the addresses of each student's teachers, sorted, by the student's id; whoever computes it, alike.

    A student may be listed twice: the later wins.
    """
    addresses = {teacher.id: teacher.address for teacher in teachers}
    chosen = assign(
        {teacher.id: teacher.weight for teacher in teachers}, {student.id: student.want for student in students}
    )
    return {student: tuple(sorted({addresses[teacher] for teacher in chosen[student]})) for student in chosen}
