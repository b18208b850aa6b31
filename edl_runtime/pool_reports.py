"""What the members of a pool report about once a second, with the beat of their lease: who is busy, and who waits.

`edl_runtime.registry.pools` reads it, `edl_runtime.autoscale.policy.pool_size` decides by it.
"""

from __future__ import annotations

import math

import msgspec


class TeacherReport(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a teacher is.

    - `busy`: the share of the last `over_s` seconds in which its model ran or a request waited for it, 0 to 1; of a
      teacher with several devices, their mean.
    - `over_s`: ten, or fewer of one that has just begun.
    """

    busy: float
    over_s: float


class StudentReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a student has of the pool's teachers, and what it lacks. Rates and shares are those of `over_s` seconds.

    - `waiting`: share of its time that it waited for this pool's teachers, 0 to 1; what its source took is not in it.
    - `asked`: how many teachers it asked something at a time, in the mean.
    - `samples_per_s`: what it trained on.
    - `teachers`: those it is connected to now; `want`: the most that it can use, None for all.
    - `in_flight`, `queued`: requests that teachers are asked now, and that wait for a teacher.
    - `over_s`: ten, or fewer of one that has just begun, or whose teachers have just come or gone: what was before
      that tells nothing about those it has.
    - `pauses`: it has taken no batch for much longer than it does otherwise, and does not wait: a validation, say. It
      will go on, so how idle its teachers are tells nothing. After a minute it counts as one that takes nothing.
    """

    waiting: float = 0.0
    asked: float = 0.0
    samples_per_s: float = 0.0
    teachers: int = 0
    want: int | None = None
    in_flight: int = 0
    queued: int = 0
    over_s: float = 0.0
    pauses: bool = False


class PoolDemand(msgspec.Struct, frozen=True, kw_only=True):
    """The last reports of a pool's registered members, by id; None of one that has said nothing of late.

    `settled_s`: how long ago the last of them came or went.
    """

    teachers: dict[str, TeacherReport | None] = {}
    students: dict[str, StudentReport | None] = {}
    settled_s: float = math.inf

    @property
    def busy(self) -> float | None:
        """The mean of its teachers' busy shares, None when none of them says."""
        shares = [report.busy for report in self.teachers.values() if report is not None]
        return sum(shares) / len(shares) if shares else None

    @property
    def waiting(self) -> float | None:
        """The mean of its students' shares of waiting, None when none of them says."""
        shares = [report.waiting for report in self.students.values() if report is not None]
        return sum(shares) / len(shares) if shares else None
