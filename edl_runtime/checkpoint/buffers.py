"""Host memory that snapshots are copied to, used again and again."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from edl_runtime.checkpoint.snapshot import Arrays, Snapshot

COPIERS = 2
"""Threads that copy: two take little more than half the time of one, from where on memory is the limit."""


class HostBuffers:
    """Memory for one snapshot. The first copy asks the system for it; later ones of the same arrays find it there."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, np.ndarray]] = {}

    def reserve(self, arrays: Arrays) -> None:
        """Have room for arrays like these; they are not read."""
        for rooms in self._rooms_for(arrays).values():
            for room in rooms.values():
                np.copyto(room, np.zeros((), room.dtype))  # the system gives memory when it is written to

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with arrays of its own, valid until the next copy."""
        self._rooms_for(snapshot.arrays)
        pairs = [
            (self._kept[group][name], array)
            for group, arrays in snapshot.arrays.items()
            for name, array in arrays.items()
        ]
        pairs.sort(key=lambda pair: -pair[1].nbytes)
        with ThreadPoolExecutor(COPIERS) as pool:
            list(pool.map(_copy, [pairs[first::COPIERS] for first in range(COPIERS)]))
        return msgspec.structs.replace(snapshot, arrays=self._kept)

    def _rooms_for(self, arrays: Arrays) -> dict[str, dict[str, np.ndarray]]:
        self._kept = {
            group: {name: _room_for(array, self._kept.get(group, {}).get(name)) for name, array in held.items()}
            for group, held in arrays.items()
        }
        return self._kept


def _room_for(array: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
    if kept is not None and (kept.shape, kept.dtype) == (array.shape, array.dtype):
        return kept
    return np.empty(array.shape, array.dtype)


def _copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for room, array in pairs:
        np.copyto(room, array)
