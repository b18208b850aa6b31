"""The reports of one pool's students and teachers in simulated time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import msgspec

from edl_runtime.balance.assign import assign
from edl_runtime.meter import WINDOW_S, BusyMeter
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport

LANES = 2
SETTLE_S = 5.0


class World(msgspec.Struct, frozen=True, kw_only=True):
    """A teacher takes `service_s` for a request, a student its own `steps_s` for a batch, which is one request.

    `spread`: 0 for constant times, 1 for an exponential distribution.
    """

    service_s: float
    steps_s: tuple[float, ...]
    spread: float = 0.0

    def run(self, teachers: int, seed: int = 0) -> PoolDemand:
        """Return the reports after a window with `teachers` teachers."""
        return _Run(self, teachers, random.Random(seed)).reports()

    def pace(self, teachers: int) -> float:
        """Return the speed of the slowest student with `teachers` teachers, as a share of its maximum."""
        reports = self.run(teachers).students.values()
        rates = [report.samples_per_s for report in reports if report is not None]
        return min(rate * step_s for rate, step_s in zip(rates, self.steps_s, strict=True))


class _Student:
    def __init__(self, step_s: float, teachers: Sequence[int]) -> None:
        self.step_s = step_s
        self.workers = dict.fromkeys(teachers, 0)
        self.asked = 0
        self.taken = 0
        self.answered: set[int] = set()
        self.waits_since: float | None = 0.0
        self.waited_s = 0.0

    @property
    def has_room(self) -> bool:
        return self.asked - self.taken < LANES * LANES * len(self.workers) + 2


class _Run:
    def __init__(self, world: World, teachers: int, chance: random.Random) -> None:
        self._world = world
        self._chance = chance
        own = assign({f"t{n}": 1.0 for n in range(teachers)}, {f"s{n}": None for n in range(len(world.steps_s))})
        self._students = [
            _Student(step_s, [int(name[1:]) for name in own[f"s{number}"]])
            for number, step_s in enumerate(world.steps_s)
        ]
        self._free_at = [0.0] * teachers
        self._asked = [BusyMeter(0.0) for _ in self._students]
        self._busy = [BusyMeter(0.0) for _ in range(teachers)]
        self._events: list[tuple[float, int, int, int]] = []
        """Time, student, teacher (-1 for the end of a step) and request of each event."""

    def reports(self) -> PoolDemand:
        for number in range(len(self._students)):
            self._ask(number, 0.0)
        before = self._counts(self._run_to(SETTLE_S))
        after = self._counts(self._run_to(SETTLE_S + WINDOW_S))
        shares = [(now - then) / WINDOW_S for now, then in zip(after, before, strict=True)]
        loads = [TeacherReport(busy=min(1.0, shares.pop(0)), over_s=WINDOW_S) for _ in self._busy]
        students = [
            StudentReport(
                waiting=min(1.0, shares.pop(0)),
                asked=shares.pop(0),
                samples_per_s=shares.pop(0),
                teachers=len(student.workers),
                over_s=WINDOW_S,
            )
            for student in self._students
        ]
        return PoolDemand(
            teachers={f"t{number}": load for number, load in enumerate(loads)},
            students={f"s{number}": student for number, student in enumerate(students)},
        )

    def _counts(self, now: float) -> list[float]:
        counts = [busy.total_s(now) for busy in self._busy]
        for student, asked in zip(self._students, self._asked, strict=True):
            waiting_s = 0.0 if student.waits_since is None else now - student.waits_since
            counts += [student.waited_s + waiting_s, asked.total_s(now), float(student.taken)]
        return counts

    def _run_to(self, end: float) -> float:
        while self._events and self._events[0][0] <= end:
            now, number, teacher, request = heapq.heappop(self._events)
            student = self._students[number]
            if teacher < 0:
                student.waits_since = now
            else:
                student.workers[teacher] -= 1
                self._asked[number].end(teacher, now)
                self._busy[teacher].end("a request", now)
                student.answered.add(request)
            if student.waits_since is not None and student.taken in student.answered:
                student.answered.remove(student.taken)
                student.taken += 1
                student.waited_s += now - student.waits_since
                student.waits_since = None
                heapq.heappush(self._events, (now + self._lasts(student.step_s), number, -1, 0))
            self._ask(number, now)
        return end

    def _ask(self, number: int, now: float) -> None:
        student = self._students[number]
        while student.has_room and min(student.workers.values()) < LANES:
            teacher = min(student.workers, key=lambda each: student.workers[each])
            student.workers[teacher] += 1
            self._asked[number].begin(teacher, now)
            self._busy[teacher].begin("a request", now)
            self._free_at[teacher] = max(now, self._free_at[teacher]) + self._lasts(self._world.service_s)
            heapq.heappush(self._events, (self._free_at[teacher], number, teacher, student.asked))
            student.asked += 1

    def _lasts(self, mean_s: float) -> float:
        return mean_s * (1 - self._world.spread + self._world.spread * self._chance.expovariate(1.0))
