"""Which student uses which teachers: a pure function that every student computes from the same lists.

1. *Rounds.* Each teacher gets a student, the heaviest teachers first. A student's slot costs the weight that it already
   has, and the cheapest slots are filled, so the students' sums differ by at most the heaviest teacher (Graham's LPT
   rule, 1969), as far as their wants allow.
2. *Sharing.* Of the students with the least weight, some may have got no teacher in the last round: each of them shares
   one that was given in it. A teacher's slot costs the number of its students over its weight (D'Hondt's divisors). So
   two students of three equal teachers have one each and share the third. A shared teacher answers more slowly, which
   holds up the reader, so sharing is limited (`most_sharing`); beyond the limit some students have one teacher more.

Ties are decided by scores, hashes of both ids: rendezvous hashing (Thaler and Ravishankar 1998) with bounded loads
(Mirrokni, Thorup and Zadimoghaddam 2018). Scores never change, so a join or leave moves only about ln n pairs on top of
those that fair shares need. With many different weights the shares stay fair but more pairs move.

Costs are exact and scores are whole numbers, so all machines agree. A pair takes about 20 ns and 24 bytes
(`benchmarks/assign.py`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Hashes: TypeAlias = NDArray[np.uint64]
    Places: TypeAlias = NDArray[np.intp]

Cost: TypeAlias = int | Fraction
Pair: TypeAlias = tuple[int, int]  # teacher, student

PAIRS_PER_PLACE = 4
"""Pairs of one round of `_match`, for each remaining item and bin: enough to match most of them."""


def assign(teachers: Mapping[str, float], students: Mapping[str, int | None]) -> dict[str, tuple[str, ...]]:
    """Return each student's teachers, sorted: at least one, if there are any.

    `teachers`: id → weight above 0. `students`: id → most teachers that it can use, None for all. Each teacher is used
    unless no student can use more; the heaviest are used first then.
    """
    givers, takers = sorted(teachers), sorted(students)
    weights = _whole([teachers[teacher] for teacher in givers])
    ids = _hashes("teacher", givers), _hashes("student", takers)
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
    """Return how many students may share a teacher if each has `own` other teachers.

    Each student has two requests at a teacher, so a teacher shared by n answers after 2n runs. Meanwhile each of the
    other teachers answers 2n requests, which have to fit into the window of four requests for each teacher.
    """
    if not own:
        return math.inf
    return 3 if own <= 2 else 2


def _rounds(
    teachers: Hashes, students: Hashes, weights: Sequence[int], wants: Sequence[int | None]
) -> tuple[list[Pair], list[int], list[int]]:
    """Return a student for each teacher, the teachers of the last round, and the students without one in it."""
    import numpy as np

    free, loads = list(wants), [0] * len(wants)
    pairs: list[Pair] = []
    given_at: dict[int, list[int]] = {}
    """Weight → the teachers given to students that had this weight before."""
    for weight, alike in _by_weight(range(len(weights)), weights):
        lightest = heapq.nsmallest(len(alike), (load for load, room in zip(loads, free, strict=True) if room != 0))
        if not lightest:
            break
        rooms = {
            student: room
            for student, (load, room) in enumerate(zip(loads, free, strict=True))
            if room != 0 and load <= lightest[-1]  # the slots of others cost too much
        }
        slots = _CheapestSlots(rooms, partial(_load_cost, loads, weight), len(alike))
        for teacher, student in _match(teachers, students, np.array(alike), np.array([*rooms]), slots):
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
    """Yield a teacher for each student in `left_out`; `rooms`: teacher → how many more students it may have."""
    import numpy as np

    slots = _CheapestSlots(rooms, partial(_seat_cost, weights), len(left_out))
    left = np.array(left_out, np.intp)
    for _, alike in _by_weight(rooms, weights):
        served = []
        for student, teacher in _match(students, teachers, left, np.array(alike), slots):
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

    `rooms` is the number of slots of each bin, None for any; `cost` the increasing cost of each slot. A bin owns its
    slots below the highest cost; those at the highest cost are shared by all bins with one, first come first served.
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
    return Fraction(seat + 2, weights[teacher])  # it has one student already


def _load_cost(loads: Sequence[int], weight: int, student: int, more: int) -> Cost:
    return loads[student] + more * weight


# Highest random weight (rendezvous) hashing. A score has 64 bits: the hashes of both ids, xor'ed and mixed. It is the
# same on every machine and with every version of Python and numpy: unsigned numbers wrap around everywhere alike.


def _hashes(role: str, ids: Sequence[str]) -> Hashes:
    """Return a hash of each id, which depends on the role."""
    import numpy as np

    person = role.encode()
    digests = b"".join(blake2b(id_.encode(), digest_size=8, person=person).digest() for id_ in ids)
    return np.frombuffer(digests, ">u8").astype(np.uint64)


def _match(
    items: Hashes, bins: Hashes, item_places: Places, bin_places: Places, slots: _CheapestSlots
) -> Iterator[tuple[int, int]]:
    """Yield (item, bin), as indices of `items` and `bins`, for each item that gets a slot.

    Takes all pairs of the given indices by falling score, equal scores in order of the indices.
    """
    while item_places.size and bin_places.size:
        scores = _mixed(items[item_places][:, None] ^ bins[bin_places]).ravel()
        rows, columns = divmod(_best(scores, PAIRS_PER_PLACE * (item_places.size + bin_places.size)), bin_places.size)
        placed = set()
        for item, bin_ in zip(item_places[rows].tolist(), bin_places[columns].tolist(), strict=True):
            if item not in placed and slots.take(bin_):
                yield item, bin_
                placed.add(item)
                if len(placed) == item_places.size:
                    return
        # All pairs of the remaining items and bins have lower scores than those tried so far.
        item_places = item_places[[item not in placed for item in item_places.tolist()]]
        bin_places = bin_places[[slots.has(bin_) for bin_ in bin_places.tolist()]]


def _best(scores: Hashes, count: int) -> Places:
    """Return the indices of the `count` highest scores, highest first; more if the lowest is repeated."""
    import numpy as np

    if count >= scores.size:
        return np.argsort(~scores, kind="stable")
    lowest = np.partition(scores, scores.size - count)[scores.size - count]
    best = np.flatnonzero(scores >= lowest)
    return best[np.argsort(~scores[best], kind="stable")]


def _mixed(scores: Hashes) -> Hashes:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood 2014), in place: every bit depends on all."""
    import numpy as np

    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        scores ^= scores >> np.uint64(shift)
        scores *= np.uint64(factor)
    scores ^= scores >> np.uint64(31)
    return scores
