"""The memory that the front and its predictors share, and who gets a slot of it."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Iterator

import pytest

from edl_runtime.teacher.http.admission import SlotQueue
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


class Client:
    """Notes its name when it is given a slot."""

    def __init__(self, name: str, given: list[str]) -> None:
        self.slot = -1
        self._name = name
        self._given = given

    def begin_body(self, slot: int) -> None:
        self.slot = slot
        self._given.append(self._name)


@pytest.fixture
def slots() -> Iterator[SlotQueue]:
    """One slot."""
    arena = Arena.create(4096, slots=1)
    yield SlotQueue(arena)
    arena.close()


def test_those_who_wait_are_served_in_the_order_in_which_they_came(slots: SlotQueue) -> None:
    """A slot that is given back goes to who has waited longest; who has left meanwhile is passed over."""
    given: list[str] = []
    clients = {name: Client(name, given) for name in "abcd"}
    for client in clients.values():
        slots.take(client)
    assert given == ["a"]
    slots.leave(clients["b"])
    assert slots.in_flight == 3
    slots.give_back(clients["a"].slot, 0, 0)
    assert given == ["a", "c"]
    assert slots.in_flight == 2
    slots.give_back(clients["c"].slot, 0, 0)
    assert given == ["a", "c", "d"]


class Refused(Client):
    """Gives its slot back at once, as one does whose predictor is gone."""

    def __init__(self, name: str, given: list[str], slots: SlotQueue) -> None:
        super().__init__(name, given)
        self._slots = slots

    def begin_body(self, slot: int) -> None:
        super().begin_body(slot)
        self._slots.give_back(slot, 0, 0)


def test_any_number_may_give_their_slots_back_at_once(slots: SlotQueue) -> None:
    """Those behind them get theirs, in order, however many they are."""
    given: list[str] = []
    first, last = Client("first", given), Client("last", given)
    slots.take(first)
    names = [str(number) for number in range(5000)]
    for name in names:
        slots.take(Refused(name, given, slots))
    slots.take(last)
    slots.give_back(first.slot, 0, 0)
    assert given == ["first", *names, "last"]
    assert slots.in_flight == 1


async def test_all_is_answered_when_the_last_slot_is_back(slots: SlotQueue) -> None:
    """The wait ends then, or at its limit, and says which."""
    assert await slots.all_answered(0)
    client = Client("a", [])
    slots.take(client)
    assert not await slots.all_answered(0.01)
    waiting = asyncio.create_task(slots.all_answered(60))
    await asyncio.sleep(0)
    slots.give_back(client.slot, 0, 0)
    assert await asyncio.wait_for(waiting, 60)
