"""Where instances fit on nodes: best fit, one instance at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from edl_runtime.autoscale.jobs import SMALLEST

Size = tuple[int, ...]  # of one instance: thousandths of each resource


class Floor:
    """What is free on each node. It is given in units of each resource, and counts in thousandths, rounded down.

    That may be less than nothing, and is nothing, or less, still when instances have left.

    The best fit for an instance is the node that has room for it and least room besides, the resources weighed by how
    much of each the largest node has free. As instances come, the order of the nodes stays what it was.
    """

    def __init__(self, free: Sequence[Sequence[float]], resources: int) -> None:
        quantities = np.array(free, dtype=np.float64).reshape(len(free), resources).T
        self._free: npt.NDArray[np.int64] = np.floor(np.round(quantities / SMALLEST, 6)).astype(np.int64)
        most = self._free.max(axis=1, initial=1)
        self._scale = [1.0 / max(int(amount), 1) for amount in most]
        self._slack: npt.NDArray[np.float64] = np.array(self._scale) @ self._free
        self._candidates: dict[Size, list[int]] = {}

    def seat(self, size: Size) -> int | None:
        """Take room for an instance where it fits best and return the node; None when it fits nowhere."""
        candidates = self._candidates.get(size)
        if candidates is None:
            candidates = self._candidates[size] = self._by_slack(size)
        while candidates:
            node = candidates[-1]
            if self._fits(node, size):
                self._change(node, size, -1)
                return node
            candidates.pop()  # nobody has left since, so nothing fits there any more
        return None

    def leave(self, node: int, size: Size) -> None:
        """Give back the room of an instance."""
        self._change(node, size, 1)
        self._candidates.clear()

    def total(self) -> list[int]:
        """Return what is free of each resource on all nodes together."""
        return [int(amount) for amount in self._free.sum(axis=1, dtype=np.float64)]

    def free(self, node: int) -> list[int]:
        """Return what is free on this node."""
        return [int(amount) for amount in self._free[:, node]]

    def seats(self, size: Size, leaving: Iterable[tuple[int, Size]]) -> int:
        """Return how many instances of this size would fit, if those in `leaving` (node, size) left."""
        room = self._free.copy()
        for node, others in leaving:
            room[:, node] += others
        each = [room[number] // need for number, need in enumerate(size) if need]
        return int(np.minimum.reduce(each).clip(min=0).sum())

    def _fits(self, node: int, size: Size) -> bool:
        return all(free[node] >= need for free, need in zip(self._free, size, strict=True))

    def _by_slack(self, size: Size) -> list[int]:
        """Return the nodes where an instance fits, the best at the end."""
        fits = np.ones(len(self._slack), dtype=np.bool_)
        for free, need in zip(self._free, size, strict=True):
            if need:
                fits &= free >= need
        nodes = np.flatnonzero(fits)
        found: list[int] = nodes[np.argsort(-self._slack[nodes], kind="stable")].tolist()
        return found

    def _change(self, node: int, size: Size, sign: int) -> None:
        slack = 0.0
        for free, need, scale in zip(self._free, size, self._scale, strict=True):
            if need:
                free[node] += sign * need
            slack += free[node] * scale
        self._slack[node] = slack
