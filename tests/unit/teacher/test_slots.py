"""Who gets a slot of the arena, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from edl_runtime.teacher.arena import Arena
from edl_runtime.teacher.slots import Slots


class Client:
    """Notes its name when it is given a slot."""

    def __init__(self, name: str, given: list[str]) -> None:
        self.alive = True
        self.slot = -1
        self._name = name
        self._given = given

    def begin_body(self, slot: int) -> None:
        self.slot = slot
        self._given.append(self._name)


@pytest.fixture
def slots() -> Iterator[Slots]:
    """One slot."""
    arena = Arena.create(4096, slots=1)
    yield Slots(arena)
    arena.close()


def test_those_who_wait_are_served_in_the_order_in_which_they_came(slots: Slots) -> None:
    """A slot that is given back goes to who has waited longest; who has left meanwhile is passed over."""
    given: list[str] = []
    clients = {name: Client(name, given) for name in "abcd"}
    for client in clients.values():
        slots.take(client)
    assert given == ["a"]
    clients["b"].alive = False
    slots.give_back(clients["a"].slot, 0, 0)
    assert given == ["a", "c"]
    assert slots.in_flight == 2
    slots.give_back(clients["c"].slot, 0, 0)
    assert given == ["a", "c", "d"]


async def test_all_is_answered_when_the_last_slot_is_back(slots: Slots) -> None:
    """The wait ends then, or at its limit, and says which."""
    assert await slots.all_answered(0)
    client = Client("a", [])
    slots.take(client)
    assert not await slots.all_answered(0.01)
    waiting = asyncio.create_task(slots.all_answered(60))
    await asyncio.sleep(0)
    slots.give_back(client.slot, 0, 0)
    assert await asyncio.wait_for(waiting, 10)
