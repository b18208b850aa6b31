"""Memory shared by the server and its predictors: requests are received into it, answers are sent from it."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Self

from edl_runtime.teacher.shm.regions import MappedRegion

IDLE, READING, RUNNING = range(3)
"""Stages of the request in a slot, set by the predictor: waiting or answered, being decoded, being run."""

SLOTS = 16
"""Requests that are received, run or answered at a time; further ones wait in their sockets."""

_KEPT = 64 * 1024 * 1024  # bytes of an area that stay allocated after its request


class Arena:
    """Slots of two areas of `area_size` bytes each: a request's body and its answer's.

    The memory is anonymous: the system frees it when its last process ends, however that ends, and the size of
    /dev/shm (64 MB in many containers) does not limit it. Only pages that are written use memory.

    - `regions`: by slot, the client's shared memory, which may hold the inputs.
    - `stages`: by slot, `IDLE`, `READING` or `RUNNING`. In shared memory, so that it can be read after a crash.
    - `alone`: by slot, 1 for a request that must not be joined with others.
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
        """Allocate areas of at least `area_size` bytes."""
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
        """Free a slot: return the memory beyond _KEPT of a large request or answer to the system."""
        self.regions.pop(slot, None)
        if not hasattr(mmap, "MADV_REMOVE"):
            return
        for area, used in ((2 * slot, request_size), (2 * slot + 1, answer_size)):
            if used > _KEPT:
                self._memory.madvise(mmap.MADV_REMOVE, area * self.area_size + _KEPT, self.area_size - _KEPT)

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped while views of it exist."""
        os.close(self.descriptor)


def _size(area_size: int, slots: int) -> int:
    return 2 * slots * area_size + 2 * slots
