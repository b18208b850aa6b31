"""Load reports of a pool's members, sent with each renewal of their lease, about once a second.

`edl_runtime.registry.pools` reads them, `edl_runtime.autoscale.policy.pool_size` uses them.
"""

from __future__ import annotations

import math

import msgspec


class TeacherReport(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a teacher is.

    - `busy`: the share of the last `over_s` seconds in which its model ran or a request waited, 0 to 1; the mean of
      several devices.
    - `over_s`: ten, or fewer after a start.
    - `answered`: requests answered since its start; None if unknown.
    """

    busy: float
    over_s: float
    answered: int | None = None


class StudentReport(msgspec.Struct, frozen=True, kw_only=True):
    """A student's use of the pool's teachers. Rates and shares are those of the last `over_s` seconds.

    - `waiting`: share of its time that it waited for this pool's teachers (not for its source), 0 to 1.
    - `asked`: mean number of teachers with requests at the same time.
    - `samples_per_s`: samples trained on.
    - `teachers`: teachers that it is connected to; `want`: the most that it can use, None for all.
    - `in_flight`, `queued`: requests at teachers now, and waiting for a teacher.
    - `over_s`: ten, or fewer after a start or a change of its teachers.
    - `pauses`: it has taken no batch for unusually long without waiting, as in a validation, so idle teachers are still
      needed. False again after a minute.
    - `quarantined`: teachers that it has in quarantine, address → why.
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
    quarantined: dict[str, str] = {}


class PoolDemand(msgspec.Struct, frozen=True, kw_only=True):
    """The last reports of a pool's members, by id; None without a recent one.

    `settled_s`: seconds since a member last joined or left.
    """

    teachers: dict[str, TeacherReport | None] = {}
    students: dict[str, StudentReport | None] = {}
    settled_s: float = math.inf

    @property
    def busy(self) -> float | None:
        """The mean of its teachers' busy shares, None without reports."""
        shares = [report.busy for report in self.teachers.values() if report is not None]
        return sum(shares) / len(shares) if shares else None

    @property
    def waiting(self) -> float | None:
        """The mean of its students' waiting shares, None without reports."""
        shares = [report.waiting for report in self.students.values() if report is not None]
        return sum(shares) / len(shares) if shares else None
