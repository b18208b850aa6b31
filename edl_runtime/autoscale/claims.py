"""One decision in the making: what each job has been granted, and whose instances give way for it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from edl_runtime.autoscale.floor import Floor, Size
from edl_runtime.autoscale.jobs import SMALLEST, Job, Node, Speedup, needed, there

KEEPING = 1.25
"""An instance that a job has counts so many times what a new one counts: moving one has to be worth its pause."""

_UNMEASURED = Speedup()


class Refusal(Enum):
    """Why a job was not granted another instance."""

    LIMIT = "it may have fewer than its minimum"
    CAPACITY = "the capacity is used up"
    ROOM = "no node has room"
    GAVE_WAY = "others took its place"
    SAVED = "room is saved for one that has waited for long"
    RESTS = "it was resized within the last minutes"
    NO_GAIN = "it would not make up for the pause"
    NO_FASTER = "more instances would not train faster"


class Claim:
    """A job and what it is granted: so many instances, in the order of their indexes.

    - `own`: where each of its instances is, None for one without a place. The first `held` of them may stay.
    - `found`: places for others, by index.
    - `most`: the most that it is granted.
    - `refusal`: why it was not granted more.
    """

    __slots__ = ("_share", "found", "granted", "held", "job", "most", "own", "refusal", "size", "speedup")

    def __init__(self, job: Job, size: Size, own: Sequence[int | None], share: float) -> None:
        self.job = job
        self.size = size
        self.own = own
        self.held = len(own)
        self.found: dict[int, int] = {}
        self.granted = 0
        self.most = job.most
        self.refusal: Refusal | None = None
        self._share = share
        self.speedup = job.speedup or _UNMEASURED

    @property
    def least(self) -> int:
        """The least that the job runs with."""
        return self.job.bounds.min

    def worth(self, index: int) -> float:
        """Return what the instance at this index, 1 or above, adds: weighted log-goodput per share of the cluster.

        It falls from one index to the next as long as it is above 0. What the job has is worth something always.
        """
        gain = self.gain(index)
        return max(gain * KEEPING, 0.0) if index < len(self.own) else gain

    def gain(self, index: int) -> float:
        """Return what it would add were it new."""
        goodput = self.speedup.goodput
        return self.job.weight * math.log(goodput(index + 1) / goodput(index)) / self._share

    def places(self) -> tuple[int, ...]:
        """Return where the granted instances are, or go."""
        own = self.own
        found = self.found
        return tuple(found[index] if index in found else own[index] or 0 for index in range(self.granted))


class Claims:
    """All jobs' claims on nodes and capacity. What was granted stays granted; the rest gives way where it must.

    `by_rank` are jobs in the order in which they are admitted. In that order `admit` is called, then `grow`.
    """

    def __init__(self, by_rank: Sequence[Job], nodes: Sequence[Node], capacity: Mapping[str, float]) -> None:
        self.resources = sorted({name for job in by_rank for name, need in job.resources.items() if need})
        self._left = [there(capacity[name]) if name in capacity else None for name in self.resources]
        self._nodes = {node.name: number for number, node in enumerate(nodes)}
        sizes = [tuple(needed(job.resources.get(name, 0)) for name in self.resources) for job in by_rank]
        owed = self._owed(by_rank, sizes, nodes)
        self._floor = Floor(
            [
                [node.free[name] if name in node.free else -owed.get((place, name), 0) for name in self.resources]
                for place, node in enumerate(nodes)
            ],
            len(self.resources),
        )
        wholes = self._wholes(by_rank, sizes)
        self.claims = [
            Claim(
                job,
                size,
                [self._nodes.get(node) for node in job.nodes],
                max(need / whole for need, whole in zip(size, wholes, strict=True)),
            )
            for job, size in zip(by_rank, sizes, strict=True)
        ]
        self._queue: list[tuple[Claim, int]] | None = None
        self._head = 0
        self._reachable: dict[Size, int] = {}
        for claim in self.claims:
            self._leave(claim, claim.most)

    def admit(self, claim: Claim) -> bool:
        """Grant a job its minimum, or nothing, and then all that it has leaves; return whether it was granted."""
        stays = min(claim.least, len(claim.own))
        if claim.most < claim.least:
            claim.refusal = Refusal.LIMIT
        elif claim.held < stays:
            claim.refusal = Refusal.GAVE_WAY
        elif not _affordable(claim.size, claim.least, self._left):
            claim.refusal = Refusal.CAPACITY
        elif not self._grant(claim, claim.least):
            claim.refusal = Refusal.ROOM
        else:
            return True
        self._leave(claim, 0)
        return False

    def ideal(self) -> dict[Claim, int]:
        """Return how many instances each admitted job would have if nobody had any yet, nodes aside."""
        left = list(self._left)
        shares = {claim: claim.granted for claim in self.claims if claim.granted}
        queue = [(-claim.gain(claim.granted), number, claim) for number, claim in enumerate(shares)]
        heapq.heapify(queue)
        while queue:
            worth, number, claim = queue[0]
            if worth >= 0 or shares[claim] >= claim.job.most or not _affordable(claim.size, 1, left):
                heapq.heappop(queue)
                continue
            _spend(claim.size, 1, left)
            shares[claim] += 1
            heapq.heapreplace(queue, (-claim.gain(shares[claim]), number, claim))
        return shares

    def grow(self, claim: Claim) -> bool:
        """Grant a job one instance more, or else those that it has beyond leave; return whether it was granted."""
        if claim.held <= claim.granted < len(claim.own):
            claim.refusal = Refusal.GAVE_WAY
        elif not _affordable(claim.size, 1, self._left):
            claim.refusal = Refusal.CAPACITY
        elif not self._grant(claim, 1):
            claim.refusal = Refusal.ROOM
        else:
            return True
        self._leave(claim, claim.granted)
        return False

    def would_fit(self, claim: Claim, without: Sequence[Claim]) -> bool:
        """Return whether a job's minimum could be granted if what `without` has been granted were given back."""
        back = [sum(other.size[number] * other.granted for other in without) for number in range(len(claim.size))]
        if not all(
            left is None or need * claim.least <= left + more
            for need, left, more in zip(claim.size, self._left, back, strict=True)
        ):
            return False
        gone = set(map(id, without))
        leaving = [
            (place, other.size)
            for other in self.claims
            for place in other.own[0 if id(other) in gone else other.granted : other.held]
            if place is not None
        ]
        leaving += [(place, other.size) for other in without for place in other.found.values()]
        return self._floor.seats(claim.size, leaving) >= claim.least

    def _owed(self, jobs: Sequence[Job], sizes: Sequence[Size], nodes: Sequence[Node]) -> dict[tuple[int, str], float]:
        """Return what instances count as having of what their node has none of, by node and resource."""
        owed: dict[tuple[int, str], float] = {}
        if all(name in node.free for node in nodes for name in self.resources):
            return owed
        for job, size in zip(jobs, sizes, strict=True):
            for place in [self._nodes[node] for node in job.nodes if node in self._nodes]:
                for name, need in zip(self.resources, size, strict=True):
                    if need and name not in nodes[place].free:
                        owed[place, name] = owed.get((place, name), 0) + need * SMALLEST
        return owed

    def _wholes(self, jobs: Sequence[Job], sizes: Sequence[Size]) -> list[int]:
        """Return of each resource the capacity, or what the nodes have, free or not."""
        placed = [sum(node in self._nodes for node in job.nodes) for job in jobs]
        wholes = []
        for number, (left, free) in enumerate(zip(self._left, self._floor.total(), strict=True)):
            used = sum(size[number] * count for size, count in zip(sizes, placed, strict=True))
            wholes.append(max(1, free + used if left is None else left))
        return wholes

    def _grant(self, claim: Claim, more: int) -> bool:
        first, end = claim.granted, claim.granted + more
        own = claim.own
        homeless = [index for index in range(first, end) if index >= len(own) or own[index] is None]
        claim.granted = end  # before others give way for the homeless: its own instances do not
        places = self._seats(claim, len(homeless)) if homeless else []
        if places is None:
            claim.granted = first
            return False
        claim.found.update(zip(homeless, places, strict=True))
        _spend(claim.size, more, self._left)
        return True

    def _leave(self, claim: Claim, first: int) -> None:
        for place in claim.own[first : claim.held]:
            if place is not None:
                self._floor.leave(place, claim.size)
        claim.held = min(claim.held, first)

    def _seats(self, claim: Claim, wanted: int) -> list[int] | None:
        """Take places for so many instances, or none. Others give way where nothing is free."""
        size = claim.size
        if wanted > self._reachable.get(size, wanted):
            return None
        places: list[int] = []
        while len(places) < wanted and (place := self._floor.seat(size)) is not None:
            places.append(place)
        if len(places) < wanted:
            missing = wanted - len(places)
            reached = self._make_room(claim, missing)
            if reached < missing:
                for place in places:
                    self._floor.leave(place, size)
                kept = sum(place is not None for place in claim.own[: claim.granted])
                self._reachable[size] = len(places) + reached + kept  # what is refused now may leave yet
                return None
            for _ in range(missing):
                place = self._floor.seat(size)
                assert place is not None  # noqa: S101 - room was made
                places.append(place)
        return places

    def _make_room(self, claim: Claim, wanted: int) -> int:
        """Let as many of the others leave as it takes, the least worth first; return how many instances fit then.

        If these are fewer than are wanted, nobody leaves.
        """
        size = claim.size
        room: dict[int, list[int]] = {}
        seats: dict[int, int] = {}
        waiting: dict[int, list[tuple[Claim, int]]] = {}
        leaving: list[tuple[Claim, int]] = []
        reached = 0
        for other, index in self._giving_way():
            place = other.own[index]
            if place is None:
                continue
            if place not in room:
                room[place] = self._floor.free(place)
                waiting[place] = []
            space = room[place] = [free + need for free, need in zip(room[place], other.size, strict=True)]
            waiting[place].append((other, index))
            fits = min(free // need for free, need in zip(space, size, strict=True) if need)
            if fits > seats.get(place, 0):
                reached += fits - seats.get(place, 0)
                seats[place] = fits
                leaving += waiting[place]
                waiting[place] = []
                if reached >= wanted:
                    break
        if reached >= wanted:
            for other, index in leaving:
                self._leave(other, 0 if index < other.least else max(index, other.granted))
        return reached

    def _giving_way(self) -> Iterator[tuple[Claim, int]]:
        """Yield instances that may leave, the least worth first: extra ones, then whole jobs by rank from below."""
        if self._queue is None:
            extra = [
                (claim.worth(index), -number, index, claim)
                for number, claim in enumerate(self.claims)
                for index in range(claim.least, len(claim.own))
            ]
            extra.sort(key=lambda one: (one[0], one[1], -one[2]))
            self._queue = [(claim, index) for _, _, index, claim in extra] + [
                (claim, index)
                for claim in reversed(self.claims)
                for index in reversed(range(min(claim.least, len(claim.own))))
            ]
        queue = self._queue
        while self._head < len(queue) and not _may_leave(*queue[self._head]):
            self._head += 1
        for number in range(self._head, len(queue)):
            if _may_leave(*queue[number]):
                yield queue[number]


def _affordable(size: Size, instances: int, left: Sequence[int | None]) -> bool:
    return all(some is None or need * instances <= some for need, some in zip(size, left, strict=True))


def _spend(size: Size, instances: int, left: list[int | None]) -> None:
    for number, need in enumerate(size):
        if (some := left[number]) is not None:
            left[number] = some - need * instances


def _may_leave(claim: Claim, index: int) -> bool:
    return claim.granted <= index < claim.held
