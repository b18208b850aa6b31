"""Which student uses which teachers: a pure function that every student computes alike from the same lists.

1. *Rounds.* Each teacher gets a student, the heaviest teachers first. A student's slot costs the weight that it has
   already, and the cheapest slots are filled: the students' sums differ by at most the heaviest teacher (Graham's LPT
   rule, 1969), their wants permitting.
2. *Sharing.* What is left over after whole rounds is shared. Of the students with the least weight, some may have got
   no teacher in the last round: each of them gets one of those that were given in it, which from then on serves
   several. A teacher's slot costs the number of its students over its weight (D'Hondt's divisors, which keep the
   largest load smallest). So two students of three equal teachers have one each and share the third; and where there
   are fewer teachers than students, each student has one teacher. Only students that are alike share: each has the
   same weight of its own, so equal parts of the shared teacher are fair.

   A teacher that several students share takes longer to answer each, and a reader delivers batches in order: answers
   that take too long hold up those of its other teachers. So beside teachers of its own a student shares one with few
   others (`most_sharing`); where that is not enough for all, nobody shares, and some students have one teacher more.

Which of several slots of one cost is filled is decided by scores. A pair's score is a hash of both ids: rendezvous
hashing (Thaler and Ravishankar 1998). Pairs are taken, those of the heaviest teachers first, by falling score as long
as both sides have a slot: consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018), here with
exact bounds. Since a pair's score never changes, one who joins or leaves moves only those along chains of better
offers, about ln n pairs, on top of those that fair shares demand anyhow.

Weights come in few kinds (1, 2, 4); if every teacher has a weight of its own, the shares stay fair and more is moved.

Costs are exact and scores (see `rendezvous`) are whole numbers, so all machines agree. A pair takes some 20 ns, and
24 bytes while it is looked at: `benchmarks/assign.py` measures it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from edl_runtime.balance.hrw import hashes, match

if TYPE_CHECKING:
    from edl_runtime.balance.hrw import Hashes

Cost: TypeAlias = int | Fraction
Pair: TypeAlias = tuple[int, int]  # teacher, student


def assign(teachers: Mapping[str, float], students: Mapping[str, int | None]) -> dict[str, tuple[str, ...]]:
    """Return each student's teachers, sorted: none without teachers, at least one otherwise.

    `teachers` have weights above 0 (shares of the work); `students` say how many teachers they can use, at least 1,
    None for all. Each teacher is used unless no student can use more; the heaviest are used first then.
    """
    givers, takers = sorted(teachers), sorted(students)
    weights = _whole([teachers[teacher] for teacher in givers])
    ids = hashes("teacher", givers), hashes("student", takers)
    pairs, last_round, left_out = _rounds(*ids, weights, [students[student] for student in takers])
    own = Counter(student for _, student in pairs)
    others = most_sharing(max((own[student] for student in left_out), default=0)) - 1
    if len(left_out) <= others * len(last_round):
        pairs += _sharing(*ids, weights, dict.fromkeys(last_round, others), left_out)
    chosen: dict[str, list[str]] = {student: [] for student in students}
    for teacher, student in pairs:
        chosen[takers[student]].append(givers[teacher])
    return {student: tuple(sorted(its)) for student, its in chosen.items()}


def most_sharing(own: int) -> float:
    """Return how many students may share a teacher if each has so many teachers of its own beside it.

    Each student has two requests at a teacher, so one that n students share answers after 2n runs of its model. Each
    teacher of one's own does 2n requests meanwhile, and has to find them in the window, of four requests a teacher.
    """
    if not own:
        return math.inf
    return 3 if own <= 2 else 2


def _rounds(
    teachers: Hashes, students: Hashes, weights: Sequence[int], wants: Sequence[int | None]
) -> tuple[list[Pair], list[int], list[int]]:
    """Return a student for each teacher; the teachers of the last round, and the students that got none in it."""
    import numpy as np

    free, loads = list(wants), [0] * len(wants)
    pairs: list[Pair] = []
    given_at: dict[int, list[int]] = {}
    """A weight → the teachers that were given to students that had so much."""
    for weight, alike in _by_weight(range(len(weights)), weights):
        lightest = heapq.nsmallest(len(alike), (load for load, room in zip(loads, free, strict=True) if room != 0))
        if not lightest:
            break
        rooms = {
            student: room
            for student, (load, room) in enumerate(zip(loads, free, strict=True))
            if room != 0 and load <= lightest[-1]  # the others' slots are too dear
        }
        slots = _CheapestSlots(rooms, partial(_load_cost, loads, weight), len(alike))
        for teacher, student in match(teachers, students, np.array(alike), np.array([*rooms]), slots):
            given_at.setdefault(loads[student], []).append(teacher)
            loads[student] += weight
            if (room := free[student]) is not None:
                free[student] = room - 1
            pairs.append((teacher, student))
    able = [student for student, room in enumerate(free) if room != 0]
    least = min((loads[student] for student in able), default=0)
    return pairs, given_at.get(least, []), [student for student in able if loads[student] == least]


def _sharing(
    teachers: Hashes, students: Hashes, weights: Sequence[int], rooms: Mapping[int, float], left_out: Sequence[int]
) -> Iterator[Pair]:
    """Yield a teacher for each student that was left out; `rooms`: those that have one, how many more they may have."""
    import numpy as np

    slots = _CheapestSlots(rooms, partial(_seat_cost, weights), len(left_out))
    left = np.array(left_out, np.intp)
    for _, alike in _by_weight(rooms, weights):
        served = []
        for student, teacher in match(students, teachers, left, np.array(alike), slots):
            served.append(student)
            yield teacher, student
        left = np.setdiff1d(left, served)


def _whole(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the same proportions."""
    exact = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    return [weight.numerator * (unit // weight.denominator) for weight in exact]


def _by_weight(teachers: Iterable[int], weights: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return each weight with the teachers that have it, the heaviest first."""
    alike: dict[int, list[int]] = {}
    for teacher in teachers:
        alike.setdefault(weights[teacher], []).append(teacher)
    return sorted(alike.items(), reverse=True)


class _CheapestSlots:
    """The `wanted` cheapest slots of bins.

    `rooms` says how many slots each bin has, None for any number, and `cost` what each of them costs, from 0 on: ever
    more. A bin has slots of its own, below the cost of the dearest; the dearest themselves are shared by all bins that
    have one at that cost, first come first served.
    """

    def __init__(self, rooms: Mapping[int, float | None], cost: Callable[[int, int], Cost], wanted: int) -> None:
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
    return Fraction(seat + 2, weights[teacher])  # one student is there already


def _load_cost(loads: Sequence[int], weight: int, student: int, more: int) -> Cost:
    return loads[student] + more * weight
