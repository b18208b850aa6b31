"""Host memory that snapshots are copied to, used again and again."""

from __future__ import annotations

import msgspec
import numpy as np

from edl_runtime.checkpoint.snapshot import Snapshot


class HostBuffers:
    """Memory for one snapshot. The first copy asks the system for it; later ones of the same arrays find it there."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, np.ndarray]] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with arrays of its own, valid until the next copy."""
        self._kept = {
            group: {name: _copied(array, self._kept.get(group, {}).get(name)) for name, array in arrays.items()}
            for group, arrays in snapshot.arrays.items()
        }
        return msgspec.structs.replace(snapshot, arrays=self._kept)


def _copied(array: np.ndarray, room: np.ndarray | None) -> np.ndarray:
    if room is None or room.shape != array.shape or room.dtype != array.dtype:
        room = np.empty(array.shape, array.dtype)
    np.copyto(room, array)
    return room
