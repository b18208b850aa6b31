"""Which student uses which teachers: a pure function that every student computes alike from the same lists.

The fewer share the more. With at least as many teachers as students each teacher serves one student; with fewer each
student has one teacher. Two steps decide who:

1. *How many.* Those among whom the others are shared out get slots, the cheapest first. Students get teachers, the
   heaviest first, and a slot costs the weight that its student has already: the students' sums differ by at most the
   heaviest teacher (Graham's LPT rule, 1969), their wants permitting. Teachers get students, and a slot costs their
   number over the teacher's weight (D'Hondt's divisors, which keep the largest load smallest), after one for each.
   Where slots of equal cost are more than are needed, step 2 chooses among them.
2. *Which.* Each pair has a score, a hash of both ids: rendezvous hashing (Thaler and Ravishankar 1998). Pairs are
   taken, those of the heaviest teachers first, by falling score as long as both sides have a slot: consistent hashing
   with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018), here with exact bounds. Since a pair's score never
   changes, one who joins or leaves moves only those along chains of better offers, about ln n pairs on top of
   those that fair shares demand anyhow.

Weights come in few kinds (1, 2, 4); if every teacher has a weight of its own, the shares stay fair and more is moved.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from hashlib import blake2b
from itertools import islice


def assign(teachers: Mapping[str, float], students: Mapping[str, int | None]) -> dict[str, tuple[str, ...]]:
    """Return each student's teachers, sorted: none without teachers, at least one otherwise.

    `teachers` have weights above 0 (shares of the work); `students` say how many teachers they can use, at least 1,
    None for all. Each teacher is used unless no student can use more; the heaviest are used first then.
    """
    if len(teachers) < len(students):
        chosen = _one_teacher_each(teachers, students)
    else:
        chosen = _one_student_each(teachers, students)
    return {student: tuple(sorted(chosen.get(student, ()))) for student in students}


def _one_teacher_each(teachers: Mapping[str, float], students: Iterable[str]) -> dict[str, list[str]]:
    items = list(students)
    slots = _Slots({teacher: _seat_costs(weight) for teacher, weight in teachers.items()}, len(items))
    scored = (
        ((weight, _score(teacher, student)), student, teacher)
        for teacher, weight in teachers.items()
        for student in items
    )
    return {student: [teacher] for student, teacher in _match(scored, slots)}


def _one_student_each(teachers: Mapping[str, float], students: Mapping[str, int | None]) -> dict[str, list[str]]:
    chosen: dict[str, list[str]] = {student: [] for student in students}
    loads = {student: Fraction(0) for student in students}
    for weight in sorted(set(teachers.values()), reverse=True):
        items = [teacher for teacher in teachers if teachers[teacher] == weight]
        free = {student: None if want is None else want - len(chosen[student]) for student, want in students.items()}
        costs = {student: islice(_load_costs(loads[student], weight), free[student]) for student in students}
        scored = (((weight, _score(teacher, student)), teacher, student) for teacher in items for student in students)
        for teacher, student in _match(scored, _Slots(costs, len(items))):
            chosen[student].append(teacher)
            loads[student] += Fraction(weight)
    return chosen


class _Slots:
    """The `wanted` cheapest slots of those that `costs` names, each bin's in rising order.

    A bin has slots of its own, below the cost of the dearest; the dearest themselves are shared by all bins that
    have one at that cost, first come first served.
    """

    def __init__(self, costs: Mapping[str, Iterator[Fraction]], wanted: int) -> None:
        self._own = dict.fromkeys(costs, 0)
        offers = [(cost, bin_) for bin_, rising in costs.items() if (cost := next(rising, None)) is not None]
        heapq.heapify(offers)
        dearest = None
        at_dearest: list[str] = []
        while offers and wanted > 0:
            cost, bin_ = heapq.heappop(offers)
            wanted -= 1
            if cost != dearest:
                for earlier in at_dearest:
                    self._own[earlier] += 1
                dearest, at_dearest = cost, []
            at_dearest.append(bin_)
            if (following := next(costs[bin_], None)) is not None:
                heapq.heappush(offers, (following, bin_))
        self._shared = len(at_dearest)
        self._sharing = {*at_dearest, *(bin_ for cost, bin_ in offers if cost == dearest)}

    def take(self, bin_: str) -> bool:
        """Use up a slot of the bin; return whether it had one."""
        if self._own[bin_]:
            self._own[bin_] -= 1
        elif self._shared and bin_ in self._sharing:
            self._sharing.remove(bin_)
            self._shared -= 1
        else:
            return False
        return True


def _match(scored: Iterable[tuple[tuple[float, bytes], str, str]], slots: _Slots) -> Iterator[tuple[str, str]]:
    """Yield (item, bin) for each item that finds a slot; `scored` has (rank, item, bin) of all pairs."""
    placed = set()
    for _, item, bin_ in sorted(scored, reverse=True):
        if item not in placed and slots.take(bin_):
            placed.add(item)
            yield item, bin_


def _seat_costs(weight: float) -> Iterator[Fraction]:
    yield Fraction(0)
    seats = 2
    while True:
        yield seats / Fraction(weight)
        seats += 1


def _load_costs(load: Fraction, weight: float) -> Iterator[Fraction]:
    while True:
        yield load
        load += Fraction(weight)


def _score(teacher: str, student: str) -> bytes:
    return blake2b(f"{len(teacher)}:{teacher}{student}".encode(), digest_size=8).digest()
