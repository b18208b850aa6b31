"""Allocates instances to jobs on nodes: best fit, with preemption."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edl_runtime.autoscale.policy.groups import Group
from edl_runtime.autoscale.policy.model import QUANTUM, Node, Speedup, Workload, milli_available, milli_needed

ResourceVector = tuple[int, ...]  # of one instance: thousandths of each resource


class NodePacker:
    """What is free on each node, in thousandths, rounded down. It may be negative.

    The best fit for an instance is the node with room for it and the least other room, resources weighed by how much of
    each the largest node has free. The weights stay as instances are placed.
    """

    def __init__(self, free: Sequence[Sequence[float]], resources: int) -> None:
        quantities = np.array(free, dtype=np.float64).reshape(len(free), resources).T
        self._free: npt.NDArray[np.int64] = np.floor(np.round(quantities / QUANTUM, 6)).astype(np.int64)
        most = self._free.max(axis=1, initial=1)
        self._scale = [1.0 / max(int(amount), 1) for amount in most]
        self._slack: npt.NDArray[np.float64] = np.array(self._scale) @ self._free
        self._candidates: dict[ResourceVector, list[int]] = {}

    def place(self, size: ResourceVector) -> int | None:
        """Place an instance on the node of best fit and return that; None when it fits nowhere."""
        candidates = self._candidates.get(size)
        if candidates is None:
            candidates = self._candidates[size] = self._by_slack(size)
        while candidates:
            node = candidates[-1]
            if self._fits(node, size):
                self._change(node, size, -1)
                return node
            candidates.pop()  # no instance was released since, or the list would be gone: nothing fits there any more
        return None

    def release(self, node: int, size: ResourceVector) -> None:
        """Give back the room of an instance."""
        self._change(node, size, 1)
        self._candidates.clear()

    def total(self) -> list[int]:
        """Return what is free of each resource on all nodes together."""
        return [int(amount) for amount in self._free.sum(axis=1, dtype=np.float64)]

    def free(self, node: int) -> list[int]:
        """Return what is free on this node."""
        return [int(amount) for amount in self._free[:, node]]

    def would_hold(
        self, wanted: Iterable[tuple[ResourceVector, int]], leaving: Iterable[tuple[int, ResourceVector]]
    ) -> bool:
        """Return whether so many instances of each size would fit without those in `leaving` (node, size)."""
        room = self._free.copy()
        for node, others in leaving:
            room[:, node] += others
        for size, count in wanted:
            fits = np.minimum.reduce([room[number] // need for number, need in enumerate(size) if need]).clip(min=0)
            placed = np.clip(count - (fits.cumsum() - fits), 0, fits)
            if placed.sum() < count:
                return False
            room -= np.outer(size, placed)
        return True

    def state(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return what `restore` takes."""
        return self._free.copy(), self._slack.copy()

    def restore(self, free: npt.NDArray[np.int64], slack: npt.NDArray[np.float64]) -> None:
        """Undo all that was placed and released since `state`."""
        self._free, self._slack = free, slack
        self._candidates.clear()

    def _fits(self, node: int, size: ResourceVector) -> bool:
        return all(free[node] >= need for free, need in zip(self._free, size, strict=True))

    def _by_slack(self, size: ResourceVector) -> list[int]:
        """Return the nodes where an instance fits, the best at the end."""
        fits = np.ones(len(self._slack), dtype=np.bool_)
        for free, need in zip(self._free, size, strict=True):
            if need:
                fits &= free >= need
        nodes = np.flatnonzero(fits)
        found: list[int] = nodes[np.argsort(-self._slack[nodes], kind="stable")].tolist()
        return found

    def _change(self, node: int, size: ResourceVector, sign: int) -> None:
        slack = 0.0
        for free, need, scale in zip(self._free, size, self._scale, strict=True):
            if need:
                free[node] += sign * need
            slack += free[node] * scale
        self._slack[node] = slack


# The state of one decision: what each job is granted, and which instances are preempted for it.

INCUMBENT_FACTOR = 1.25
"""Worth of an instance that a job has, relative to a new one: moving one must be worth the pause."""

_UNMEASURED = Speedup()


class DenialReason(Enum):
    """Why a job was not granted another instance."""

    LIMIT = "it may have fewer than its minimum"
    CAPACITY = "the capacity is used up"
    ROOM = "no node has room"
    PREEMPTED = "others took its place"
    RESERVED = "room is reserved for a job that has waited for long"
    BY_HAND = "somebody has given it its size within the last minutes"
    STUDENTS = "none of its students trains"
    NO_GAIN = "it would not make up for the pause"
    NO_SPEEDUP = "more instances would not train faster"


class Allocation:
    """A job and how many instances it is granted, the lowest indexes first.

    - `own`: the node of each of its instances, None for an unplaced one. The first `held` of them may stay.
    - `found`: nodes for others, by index.
    - `most`: the most that it may be granted.
    - `denial`: why it was not granted more.
    - `share`: the share of the cluster that an instance takes.
    """

    __slots__ = ("denial", "found", "granted", "held", "job", "most", "own", "share", "size", "speedup")

    def __init__(self, job: Workload, size: ResourceVector, own: Sequence[int | None], share: float) -> None:
        self.job = job
        self.size = size
        self.own = own
        self.held = len(own)
        self.found: dict[int, int] = {}
        self.granted = 0
        self.most = job.most
        self.denial: DenialReason | None = None
        self.share = share
        self.speedup = job.speedup or _UNMEASURED

    @property
    def least(self) -> int:
        """The minimum of the job."""
        return self.job.bounds.min

    def worth(self, index: int) -> float:
        """Return what the instance at this index, 1 or above, adds: weighted log-goodput per share of the cluster.

        While above 0 it falls with the index. For an instance that the job has it is never negative.
        """
        gain = self.gain(index)
        return max(gain * INCUMBENT_FACTOR, 0.0) if index < len(self.own) else gain

    def gain(self, index: int) -> float:
        """Return what it would add as a new instance."""
        goodput = self.speedup.goodput
        return self.job.weight * math.log(goodput(index + 1) / goodput(index)) / self.share

    def places(self) -> tuple[int, ...]:
        """Return the nodes of the granted instances."""
        own = self.own
        found = self.found
        return tuple(found[index] if index in found else own[index] or 0 for index in range(self.granted))


class _State(NamedTuple):
    """What changes as instances are placed and preempted, beside what is granted."""

    free: npt.NDArray[np.int64]
    slack: npt.NDArray[np.float64]
    held: list[int]
    reachable: dict[ResourceVector, int]


class Allocator:
    """Allocates nodes and capacity to all jobs. A grant is final; instances not granted yet can be preempted.

    `groups`: in order of admission. Call `admit` or `deny` in that order, then `grow`.
    """

    def __init__(self, groups: Sequence[Group], nodes: Sequence[Node], capacity: Mapping[str, float]) -> None:
        self._undecided = Counter(member.name for group in groups for member in group.members)
        by_rank = list({member.name: member for group in groups for member in group.members}.values())
        self.resources = sorted({name for job in by_rank for name, need in job.resources.items() if need})
        self._left = [milli_available(capacity[name]) if name in capacity else None for name in self.resources]
        self._nodes = {node.name: number for number, node in enumerate(nodes)}
        sizes = [tuple(milli_needed(job.resources.get(name, 0)) for name in self.resources) for job in by_rank]
        owed = self._owed(by_rank, sizes, nodes)
        self._packer = NodePacker(
            [
                [node.free[name] if name in node.free else -owed.get((place, name), 0) for name in self.resources]
                for place, node in enumerate(nodes)
            ],
            len(self.resources),
        )
        wholes = self._wholes(by_rank, sizes)
        self.allocations = [
            Allocation(
                job,
                size,
                [self._nodes.get(node) for node in job.nodes],
                max(need / whole for need, whole in zip(size, wholes, strict=True)),
            )
            for job, size in zip(by_rank, sizes, strict=True)
        ]
        self._by_name = {allocation.job.name: allocation for allocation in self.allocations}
        self._queue: list[tuple[Allocation, int]] | None = None
        self._head = 0
        self._reachable: dict[ResourceVector, int] = {}
        for allocation in self.allocations:
            self._release(allocation, allocation.most)

    def members(self, group: Group) -> list[Allocation]:
        """Return the group's allocations, its job's first."""
        return [self._by_name[member.name] for member in group.members]

    def admit(self, group: Group) -> bool:
        """Grant a group its minimums and return True; or `deny` it and return False."""
        members = self.members(group)
        new = [one for one in members if not one.granted]
        if not group.is_allowed:
            denial = DenialReason.LIMIT
        elif any(one.held < min(one.least, len(one.own)) for one in new):
            denial = DenialReason.PREEMPTED
        elif not self._affords(new):
            denial = DenialReason.CAPACITY
        elif not self._grant_minimums(new):
            denial = DenialReason.ROOM
        else:
            self._undecided.subtract(one.job.name for one in members)
            return True
        self.deny(group, denial)
        return False

    def deny(self, group: Group, reason: DenialReason) -> None:
        """Release all instances of a group, but for pools that another group has, or may still get."""
        job, *_ = members = self.members(group)
        for one in members:
            self._undecided[one.job.name] -= 1
            if not one.granted and not self._undecided[one.job.name]:
                one.denial = reason if one is job else one.denial or DenialReason.STUDENTS
                self._release(one, 0)

    def ideal(self) -> dict[Allocation, int]:
        """Return how many instances each admitted job would get from scratch, ignoring nodes."""
        left = list(self._left)
        shares = {allocation: allocation.granted for allocation in self.allocations if allocation.granted}
        queue = [(-allocation.gain(allocation.granted), number, allocation) for number, allocation in enumerate(shares)]
        heapq.heapify(queue)
        while queue:
            worth, number, allocation = queue[0]
            if worth >= 0 or shares[allocation] >= allocation.job.most or not _affordable(allocation.size, 1, left):
                heapq.heappop(queue)
                continue
            _spend(allocation.size, 1, left)
            shares[allocation] += 1
            heapq.heapreplace(queue, (-allocation.gain(shares[allocation]), number, allocation))
        return shares

    def grow(self, allocation: Allocation) -> bool:
        """Grant a job one more instance and return True; or release the rest of its own and return False."""
        if allocation.held <= allocation.granted < len(allocation.own):
            allocation.denial = DenialReason.PREEMPTED
        elif not _affordable(allocation.size, 1, self._left):
            allocation.denial = DenialReason.CAPACITY
        elif not self._grant_one_more(allocation):
            allocation.denial = DenialReason.ROOM
        else:
            return True
        self._release(allocation, allocation.granted)
        return False

    def would_fit(self, group: Group, without: Container[str]) -> bool:
        """Return whether a group's minimums would fit without what the jobs `without`, by name, have been granted."""
        gone = {one for one in self.allocations if one.job.name in without}
        needed = [one for one in self.members(group) if one in gone or not one.granted]
        if not self._affords(needed, gone):
            return False
        leaving = [
            (place, other.size)
            for other in self.allocations
            for place in other.own[0 if other in gone else other.granted : other.held]
            if place is not None
        ]
        leaving += [(place, other.size) for other in gone for place in other.found.values()]
        return self._packer.would_hold([(one.size, one.least) for one in needed], leaving)

    def _owed(
        self, jobs: Sequence[Workload], sizes: Sequence[ResourceVector], nodes: Sequence[Node]
    ) -> dict[tuple[int, str], float]:
        """Return what instances reserve of resources that their node does not name, by node and resource."""
        owed: dict[tuple[int, str], float] = {}
        if all(name in node.free for node in nodes for name in self.resources):
            return owed
        for job, size in zip(jobs, sizes, strict=True):
            for place in [self._nodes[node] for node in job.nodes if node in self._nodes]:
                for name, need in zip(self.resources, size, strict=True):
                    if need and name not in nodes[place].free:
                        owed[place, name] = owed.get((place, name), 0) + need * QUANTUM
        return owed

    def _wholes(self, jobs: Sequence[Workload], sizes: Sequence[ResourceVector]) -> list[int]:
        """Return the total of each resource: its capacity, or else what the nodes have, free or not."""
        placed = [sum(node in self._nodes for node in job.nodes) for job in jobs]
        wholes = []
        for number, (left, free) in enumerate(zip(self._left, self._packer.total(), strict=True)):
            used = sum(size[number] * count for size, count in zip(sizes, placed, strict=True))
            wholes.append(max(1, free + used if left is None else left))
        return wholes

    def _affords(self, new: Sequence[Allocation], gone: Collection[Allocation] = ()) -> bool:
        """Return whether the capacity is enough for the minimums of `new`, without what `gone` have been granted."""
        needs = [sum(one.size[number] * one.least for one in new) for number in range(len(self.resources))]
        back = [sum(one.size[number] * one.granted for one in gone) for number in range(len(self.resources))]
        return all(
            left is None or need <= left + more for need, left, more in zip(needs, self._left, back, strict=True)
        )

    def _grant_minimums(self, new: Sequence[Allocation]) -> bool:
        """Grant all of `new` their minimums, or none of them."""
        before, head = self._state() if len(new) > 1 else None, self._head
        for one in new:
            one.granted = one.least  # first, so that their own instances are not preempted for one another
        for one in sorted(new, key=lambda one: -one.share):
            if not self._place(one, 0):
                break
        else:
            for one in new:
                _spend(one.size, one.least, self._left)
            return True
        for one in new:
            one.granted = 0
            one.found.clear()
        self._head = head  # it has passed over their own instances
        if before:  # one alone that finds no room has preempted nothing
            self._restore(before)
        return False

    def _state(self) -> _State:
        held = [one.held for one in self.allocations]
        return _State(*self._packer.state(), held, dict(self._reachable))

    def _restore(self, state: _State) -> None:
        self._packer.restore(state.free, state.slack)
        for one, count in zip(self.allocations, state.held, strict=True):
            one.held = count
        self._reachable = state.reachable

    def _grant_one_more(self, allocation: Allocation) -> bool:
        allocation.granted += 1
        if not self._place(allocation, allocation.granted - 1):
            allocation.granted -= 1
            return False
        _spend(allocation.size, 1, self._left)
        return True

    def _place(self, allocation: Allocation, first: int) -> bool:
        """Place the granted instances from this index on that have no place; return whether there is room for all."""
        own = allocation.own
        unplaced = [index for index in range(first, allocation.granted) if index >= len(own) or own[index] is None]
        places = self._place_instances(allocation, len(unplaced)) if unplaced else []
        if places is None:
            return False
        allocation.found.update(zip(unplaced, places, strict=True))
        return True

    def _release(self, allocation: Allocation, first: int) -> None:
        for place in allocation.own[first : allocation.held]:
            if place is not None:
                self._packer.release(place, allocation.size)
        allocation.held = min(allocation.held, first)

    def _place_instances(self, allocation: Allocation, wanted: int) -> list[int] | None:
        """Place so many instances and return their nodes, or None. Preempts others where nothing is free."""
        size = allocation.size
        if wanted > self._reachable.get(size, wanted):
            return None
        places: list[int] = []
        while len(places) < wanted and (place := self._packer.place(size)) is not None:
            places.append(place)
        if len(places) < wanted:
            missing = wanted - len(places)
            reached = self._preempt(allocation, missing)
            if reached < missing:
                for place in places:
                    self._packer.release(place, size)
                kept = sum(place is not None for place in allocation.own[: allocation.granted])
                self._reachable[size] = (
                    len(places) + reached + kept
                )  # an upper bound: its own denied instances may leave later
                return None
            for _ in range(missing):
                place = self._packer.place(size)
                assert place is not None  # noqa: S101 - room was made
                places.append(place)
        return places

    def _preempt(self, allocation: Allocation, wanted: int) -> int:
        """Release instances of others, the least worth first, until enough fit; return how many fit then.

        If too few would fit, nothing is released.
        """
        size = allocation.size
        room: dict[int, list[int]] = {}
        seats: dict[int, int] = {}
        waiting: dict[int, list[tuple[Allocation, int]]] = {}
        leaving: list[tuple[Allocation, int]] = []
        reached = 0
        for other, index in self._preemptible():
            place = other.own[index]
            if place is None:
                continue
            if place not in room:
                room[place] = self._packer.free(place)
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
                self._release(other, 0 if index < other.least else max(index, other.granted))
        return reached

    def _preemptible(self) -> Iterator[tuple[Allocation, int]]:
        """Yield preemptible instances, least worth first: those above a minimum, then whole jobs, lowest rank first."""
        if self._queue is None:
            extra = [
                (allocation.worth(index), -number, index, allocation)
                for number, allocation in enumerate(self.allocations)
                for index in range(allocation.least, len(allocation.own))
            ]
            extra.sort(key=lambda one: (one[0], one[1], -one[2]))
            self._queue = [(allocation, index) for _, _, index, allocation in extra] + [
                (allocation, index)
                for allocation in reversed(self.allocations)
                for index in reversed(range(min(allocation.least, len(allocation.own))))
            ]
        queue = self._queue
        while self._head < len(queue) and not _is_preemptible(*queue[self._head]):
            self._head += 1
        for number in range(self._head, len(queue)):
            if _is_preemptible(*queue[number]):
                yield queue[number]


def _affordable(size: ResourceVector, instances: int, left: Sequence[int | None]) -> bool:
    return all(some is None or need * instances <= some for need, some in zip(size, left, strict=True))


def _spend(size: ResourceVector, instances: int, left: list[int | None]) -> None:
    for number, need in enumerate(size):
        if (some := left[number]) is not None:
            left[number] = some - need * instances


def _is_preemptible(allocation: Allocation, index: int) -> bool:
    return allocation.granted <= index < allocation.held
