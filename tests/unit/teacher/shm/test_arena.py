"""The memory that the server and its predictors share."""

from __future__ import annotations

import mmap

import pytest

from edl_runtime.teacher.shm.arena import _KEPT, Arena


def test_areas_do_not_overlap() -> None:
    """Each slot has memory of its own for its request and its answer, and all of it is in the arena."""
    arena = Arena.create(5000, slots=2)
    areas = [area(slot) for slot in range(2) for area in (arena.request, arena.answer)]
    for number, area in enumerate(areas):
        assert len(area) >= 5000
        area[:] = bytes([number]) * len(area)
    assert [set(area) for area in areas] == [{0}, {1}, {2}, {3}]
    arena.close()


def test_what_one_process_writes_another_reads() -> None:
    """An arena opened by its descriptor is the same memory."""
    ours = Arena.create(4096, slots=1)
    theirs = Arena(ours.descriptor, ours.area_size, ours.slots)
    ours.request(0)[:3] = b"abc"
    assert theirs.request(0)[:3] == b"abc"
    ours.close()


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="the system can't take memory back")
def test_the_memory_of_a_very_large_body_goes_back_to_the_system() -> None:
    """What is beyond the part that is kept is gone, of that body alone."""
    size = _KEPT + 4096
    arena = Arena.create(size, slots=1)
    for area in (arena.request(0), arena.answer(0)):
        area[0] = area[_KEPT] = 1
    arena.give_back(0, request_size=size, answer_size=_KEPT)
    assert [arena.request(0)[0], arena.request(0)[_KEPT]] == [1, 0]
    assert [arena.answer(0)[0], arena.answer(0)[_KEPT]] == [1, 1]
    arena.close()
