"""The memory that requests take together."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from edl_runtime.gateway.errors import NoRoomError, RequestTooLargeError
from edl_runtime.gateway.room import Holding, Room

MIB = 1 << 20


async def test_a_request_waits_until_others_have_made_room() -> None:
    """A smaller one goes ahead meanwhile; after its time the large one is told what is free."""
    room = Room(10 * MIB, 10 * MIB)
    order: list[str] = []

    async def take(name: str, size: int) -> None:
        with room.opened(name, name, 60.0) as holding:
            await holding.grow(size * MIB)
            order.append(name)

    with room.opened("p", "c", 0.0) as first:
        await first.grow(6 * MIB)
        large = asyncio.create_task(take("large", 5))
        await asyncio.sleep(0)
        await take("small", 4)
        said = "up to 7 MiB of memory, and others leave 4 of 10 MiB"
        with room.opened("q", "d", 0.0) as second, pytest.raises(NoRoomError, match=said):
            await second.grow(7 * MIB)
    await large
    assert order == ["small", "large"]


@pytest.mark.parametrize("shared", ["pool", "caller"])
async def test_one_pool_or_caller_leaves_room_to_the_others(shared: str) -> None:
    """Its requests wait for each other, and those of others don't wait for them."""
    room = Room(100, 75)
    with room.opened("p", "c", 0.0) as first, room.opened("q", "e", 0.0) as other:
        await first.grow(75)
        pool, caller = ("p", "d") if shared == "pool" else ("r", "c")
        with room.opened(pool, caller, 0.0) as second, pytest.raises(NoRoomError, match="leave 0 of 0 MiB"):
            await second.grow(1)
        await other.grow(25)


async def test_the_youngest_of_those_that_wait_for_each_other_is_refused() -> None:
    """Each holds a part of what the other needs; the older one goes on when the younger has ended."""
    room = Room(100, 100)
    order: list[str] = []

    async def grow_twice(name: str, holding: Holding, size: int) -> None:
        try:
            await holding.grow(size)
        except NoRoomError:
            order.append(f"{name} refused")
        else:
            order.append(name)

    with room.opened("p", "c", 600.0) as old:
        await old.grow(50)
        with room.opened("q", "d", 600.0) as young:
            await young.grow(40)
            waiting = asyncio.create_task(grow_twice("old", old, 30))
            await asyncio.sleep(0)
            await grow_twice("young", young, 30)
        await waiting
    assert order == ["young refused", "old"]


async def test_parts_of_one_answer_that_wait_for_each_other_are_refused() -> None:
    """As it holds all that is held, nobody else makes room."""
    room = Room(100, 100)
    with room.opened("p", "c", 600.0) as first, room.opened("q", "d", 600.0) as second:
        await first.grow(50)
        await second.grow(40)
        parts = [asyncio.create_task(second.grow(20)) for _ in range(3)]
        await asyncio.sleep(0)
        older = asyncio.create_task(first.grow(20))
        refused = await asyncio.gather(*parts, return_exceptions=True)
        assert {type(one) for one in refused} == {NoRoomError}
        older.cancel()


async def test_parts_of_one_answer_share_what_is_reserved() -> None:
    """Each byte of it is used once, also while another part waits."""
    room = Room(100, 100)
    with room.opened("p", "c", 600.0) as holding:
        with room.opened("q", "d", 600.0) as other:
            await other.grow(60)
            await holding.reserve(30)
            more = asyncio.create_task(holding.grow(50))
            await asyncio.sleep(0)
            assert holding.reserved == 0
            await holding.grow(10)
        await more
        assert (holding.size, holding.reserved) == (60, 0)


async def test_one_request_takes_no_more_than_its_share() -> None:
    """It is told so at once; what it was expected to take is cut to that."""
    room = Room(10 * MIB, 8 * MIB)
    with room.opened("p", "c", 600.0) as holding:
        with pytest.raises(
            RequestTooLargeError, match="takes 9 MiB of memory or more until it is answered, allowed are 8"
        ):
            await holding.grow(9 * MIB)
        await holding.reserve(20 * MIB)
        assert holding.size == 8 * MIB


async def test_what_is_reserved_is_used_first() -> None:
    """And is reserved again for what another teacher answers in place of one that has failed."""
    room = Room(100, 100)
    with room.opened("p", "c", 0.0) as holding:
        await holding.grow(10)
        await holding.reserve(50)
        await holding.grow(40)
        assert (holding.size, holding.reserved) == (60, 10)
        holding.unuse(40)
        await holding.grow(60)
        assert (holding.size, holding.reserved) == (70, 0)
    with room.opened("p", "c", 0.0) as holding:
        await holding.grow(100)


@pytest.mark.parametrize("end", ["given back", "refused"])
async def test_the_end_of_a_request_costs_no_more_than_a_look_at_each_that_waits(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Ten times as many that wait cost ten times as many looks at them, not a hundred times."""
    looks = 0

    def keys(holding: Holding) -> object:
        nonlocal looks
        looks += 1
        return vars(holding)["keys"]

    def set_keys(holding: Holding, given: object) -> None:
        vars(holding)["keys"] = given

    monkeypatch.setattr(Holding, "keys", property(keys, set_keys), raising=False)

    async def cost(waiting: int) -> int:
        room = Room(1000, 1000)
        with ExitStack() as waiters, room.opened("p", "c", 600.0) as large, ExitStack() as ending:
            holdings = [waiters.enter_context(room.opened("p", str(n), 600.0)) for n in range(waiting)]
            for one in holdings:
                await one.grow(1)
            last = ending.enter_context(room.opened("p", "c", 600.0))
            await last.grow(2)
            if end == "given back":
                await large.grow(998 - waiting)
            tasks = [asyncio.create_task(one.grow(2 if end == "given back" else 999)) for one in holdings]
            await asyncio.sleep(0)
            before = looks
            ending.close()
            for _ in range(3):
                await asyncio.sleep(0)
            seen = looks - before
            assert sum(task.done() for task in tasks) == 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return seen

    assert await cost(100) <= 12 * await cost(10)


async def test_one_that_is_cancelled_as_it_gets_its_bytes_gives_them_back() -> None:
    """The next one has them."""
    room = Room(100, 100)
    with room.opened("p", "c", 600.0) as second, room.opened("q", "d", 600.0) as third:
        with room.opened("r", "e", 600.0) as first:
            await first.grow(100)
            cancelled, waits = asyncio.create_task(second.grow(60)), asyncio.create_task(third.grow(60))
            await asyncio.sleep(0)
            cancelled.cancel()
        await waits
        assert (second.size, third.size) == (0, 60)


async def test_one_caller_leaves_a_part_of_its_pool_to_others() -> None:
    """Its share is smaller than the pool's, and so is what one of its requests may take."""
    room = Room(100, 75, 50)
    with room.opened("p", "c", 0.0) as first, room.opened("p", "d", 0.0) as other:
        with pytest.raises(RequestTooLargeError):
            await first.grow(51)
        await first.reserve(1000)
        await other.grow(25)
        with pytest.raises(NoRoomError):
            await other.grow(1)
        assert first.size == 50


async def test_what_is_reserved_is_a_part_of_what_it_needs_where_others_hold_something() -> None:
    """It goes on at once with what is free, if that is a quarter of the room; with less it waits for others."""
    room = Room(100, 75)
    with room.opened("p", "c", 600.0) as small, room.opened("p", "d", 600.0) as second:
        await small.grow(1)
        with room.opened("p", "e", 600.0) as first:
            await first.reserve(1000)
            assert (first.size, first.reserved) == (74, 74)
            waits = asyncio.create_task(second.reserve(1000))
            await asyncio.sleep(0)
            assert second.size == 0
        await waits
        assert second.size == 74


async def test_what_is_only_reserved_leaves_something_to_a_third_pool() -> None:
    """Two that may take half of the room each have it once they need it, and not before."""
    room = Room(80, 60, 40)
    with room.opened("p", "c", 0.0) as first, room.opened("q", "d", 0.0) as second:
        await first.reserve(1000)
        await second.reserve(1000)
        assert (first.size, second.size) == (40, 30)
        with room.opened("r", "e", 0.0) as third:
            await third.grow(10)
        await second.grow(40)
        assert second.size == 40
