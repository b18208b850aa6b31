"""Memory that the server and its predictors share: requests are received into it, answers are sent out of it."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Self

from edl_runtime.teacher.shm.regions import MappedRegion

IDLE, READING, RUNNING = range(3)
"""What a predictor does with the request in a slot: nothing yet or any more, decode it, run the model for it."""

SLOTS = 16
"""Requests that are received, computed or sent at one time; further ones wait in their sockets."""

_KEPT = 64 * 1024 * 1024  # bytes of an area that stay when its request is done; what is beyond goes back to the system


class Arena:
    """Slots of two areas of `area_size` bytes each: a request's body and its answer's.

    The memory has a descriptor and no name, so it is gone with the processes that hold it, however they end, and
    the size of /dev/shm (64 MB in many containers) does not limit it. Only pages that are written take memory.

    - `regions`: by slot, the memory that a request's client shares, in which its inputs may lie.
    - `stages`: by slot, what the predictor does with it, `IDLE`, `READING` or `RUNNING`: also when that has died.
    - `alone`: by slot, 1 for a request that is not to be run together with others.
    """

    def __init__(self, descriptor: int, area_size: int, slots: int = SLOTS) -> None:
        self.descriptor = descriptor
        self.area_size = area_size
        self.slots = slots
        self.regions: dict[int, MappedRegion] = {}
        self._memory = mmap.mmap(descriptor, _size(area_size, slots))
        self._view = memoryview(self._memory)
        notes = self._view[2 * slots * area_size :]
        self.stages, self.alone = notes[:slots], notes[slots : 2 * slots]

    @classmethod
    def create(cls, area_size: int, slots: int = SLOTS) -> Self:
        """Return new memory, with areas of at least `area_size` bytes."""
        area_size += -area_size % mmap.PAGESIZE
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("edl-teacher")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.truncate(descriptor, _size(area_size, slots))
        return cls(descriptor, area_size, slots)

    def request(self, slot: int) -> memoryview:
        """Return the area for a request's body."""
        return self._view[2 * slot * self.area_size :][: self.area_size]

    def answer(self, slot: int) -> memoryview:
        """Return the area for an answer's body."""
        return self._view[(2 * slot + 1) * self.area_size :][: self.area_size]

    def give_back(self, slot: int, request_size: int, answer_size: int) -> None:
        """Return the memory of an exceptionally large request or answer to the system."""
        self.regions.pop(slot, None)
        if not hasattr(mmap, "MADV_REMOVE"):
            return
        for area, used in ((2 * slot, request_size), (2 * slot + 1, answer_size)):
            if used > _KEPT:
                self._memory.madvise(mmap.MADV_REMOVE, area * self.area_size + _KEPT, self.area_size - _KEPT)

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped as long as views of it live."""
        os.close(self.descriptor)


def _size(area_size: int, slots: int) -> int:
    return 2 * slots * area_size + 2 * slots
