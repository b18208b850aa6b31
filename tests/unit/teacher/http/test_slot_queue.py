"""Which request gets a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from edl_runtime.teacher.http.admission import SlotQueue
from edl_runtime.teacher.shm.arena import Arena


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
    """A slot that is given back goes to the client that has waited longest; one that has disconnected is skipped."""
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
    """The wait ends then, or at its limit, and returns which of the two."""
    assert await slots.all_answered(0)
    client = Client("a", [])
    slots.take(client)
    assert not await slots.all_answered(0.01)
    waiting = asyncio.create_task(slots.all_answered(60))
    await asyncio.sleep(0)
    slots.give_back(client.slot, 0, 0)
    assert await asyncio.wait_for(waiting, 60)
