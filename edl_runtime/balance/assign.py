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

Costs are exact and scores (see `rendezvous`) are whole numbers, so all machines agree. A pair takes some 20 ns, and
24 bytes while it is looked at: `benchmarks/assign.py` measures it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import lcm
from typing import TypeAlias

from edl_runtime.balance.rendezvous import hashes, match

Cost: TypeAlias = int | Fraction
Pair: TypeAlias = tuple[int, int]  # teacher, student


def assign(teachers: Mapping[str, float], students: Mapping[str, int | None]) -> dict[str, tuple[str, ...]]:
    """Return each student's teachers, sorted: none without teachers, at least one otherwise.

    `teachers` have weights above 0 (shares of the work); `students` say how many teachers they can use, at least 1,
    None for all. Each teacher is used unless no student can use more; the heaviest are used first then.
    """
    givers, takers = sorted(teachers), sorted(students)
    weights = _whole([teachers[teacher] for teacher in givers])
    if len(givers) < len(takers):
        pairs = _one_teacher_each(givers, weights, takers)
    else:
        pairs = _one_student_each(givers, weights, takers, [students[student] for student in takers])
    chosen: dict[str, list[str]] = {student: [] for student in students}
    for teacher, student in pairs:
        chosen[takers[student]].append(givers[teacher])
    return {student: tuple(sorted(its)) for student, its in chosen.items()}


def _one_teacher_each(teachers: Sequence[str], weights: Sequence[int], students: Sequence[str]) -> Iterator[Pair]:
    import numpy as np

    slots = _Slots(dict.fromkeys(range(len(teachers))), partial(_seat_cost, weights), len(students))
    items, bins = hashes("student", students), hashes("teacher", teachers)
    left = np.ones(len(students), bool)
    for _, alike in _by_weight(weights):
        for student, teacher in match(items, bins, np.flatnonzero(left), np.array(alike), slots):
            left[student] = False
            yield teacher, student


def _one_student_each(
    teachers: Sequence[str], weights: Sequence[int], students: Sequence[str], wants: Sequence[int | None]
) -> Iterator[Pair]:
    import numpy as np

    items, bins = hashes("teacher", teachers), hashes("student", students)
    free, loads = list(wants), [0] * len(students)
    for weight, alike in _by_weight(weights):
        lightest = heapq.nsmallest(len(alike), (load for load, room in zip(loads, free, strict=True) if room != 0))
        if not lightest:
            return
        rooms = {
            student: room
            for student, (load, room) in enumerate(zip(loads, free, strict=True))
            if room != 0 and load <= lightest[-1]  # the others' slots are too dear
        }
        slots = _Slots(rooms, partial(_load_cost, loads, weight), len(alike))
        for teacher, student in match(items, bins, np.array(alike), np.array([*rooms]), slots):
            loads[student] += weight
            if (room := free[student]) is not None:
                free[student] = room - 1
            yield teacher, student


def _whole(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the same proportions."""
    exact = [Fraction(weight) for weight in weights]
    unit = lcm(*(weight.denominator for weight in exact))
    return [weight.numerator * (unit // weight.denominator) for weight in exact]


def _by_weight(weights: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return each weight with the places of the teachers that have it, the heaviest first."""
    alike: dict[int, list[int]] = {}
    for teacher, weight in enumerate(weights):
        alike.setdefault(weight, []).append(teacher)
    return sorted(alike.items(), reverse=True)


class _Slots:
    """The `wanted` cheapest slots of bins.

    `rooms` says how many slots each bin has, None for any number, and `cost` what each of them costs, from 0 on: ever
    more. A bin has slots of its own, below the cost of the dearest; the dearest themselves are shared by all bins that
    have one at that cost, first come first served.
    """

    def __init__(self, rooms: Mapping[int, int | None], cost: Callable[[int, int], Cost], wanted: int) -> None:
        self._own = dict.fromkeys(rooms, 0)
        offers = [(cost(bin_, 0), bin_, 0) for bin_ in rooms]
        heapq.heapify(offers)
        dearest = None
        at_dearest: list[int] = []
        while offers and wanted > 0:
            asked, bin_, taken = heapq.heappop(offers)
            wanted -= 1
            if asked != dearest:
                for earlier in at_dearest:
                    self._own[earlier] += 1
                dearest, at_dearest = asked, []
            at_dearest.append(bin_)
            if (room := rooms[bin_]) is None or taken + 1 < room:
                heapq.heappush(offers, (cost(bin_, taken + 1), bin_, taken + 1))
        self._shared = len(at_dearest)
        self._sharing = {*at_dearest, *(bin_ for asked, bin_, _ in offers if asked == dearest)}

    def has(self, bin_: int) -> bool:
        """Return whether the bin has a slot."""
        return self._own[bin_] > 0 or (self._shared > 0 and bin_ in self._sharing)

    def take(self, bin_: int) -> bool:
        """Use up a slot of the bin; return whether it had one."""
        if not self.has(bin_):
            return False
        if self._own[bin_]:
            self._own[bin_] -= 1
        else:
            self._sharing.remove(bin_)
            self._shared -= 1
        return True


def _seat_cost(weights: Sequence[int], teacher: int, seat: int) -> Cost:
    return Fraction(seat + 1, weights[teacher]) if seat else 0


def _load_cost(loads: Sequence[int], weight: int, student: int, more: int) -> Cost:
    return loads[student] + more * weight
