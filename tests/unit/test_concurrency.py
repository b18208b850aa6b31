"""Waiting for several coroutines, and what users of one event loop share."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from edl_runtime.concurrency import SharedInLoop, all_completed, all_ended, first_completed


class Closed(list[list[str]]):
    """Takes note of what was closed."""

    async def close(self, one: list[str]) -> None:
        self.append(one)


async def test_it_is_made_for_the_first_user_and_closed_for_the_last() -> None:
    """One for each key; who comes later gets another."""
    closed = Closed()
    shared = SharedInLoop(lambda name: [name], closed.close)
    async with AsyncExitStack() as first, shared.use("a") as kept:
        assert await first.enter_async_context(shared.use("a")) is kept
        async with shared.use("b") as other:
            assert other == ["b"]
        await first.aclose()
        assert closed == [["b"]]
    assert closed[-1] is kept
    assert not shared.made
    async with shared.use("a") as later:
        assert later is not kept


async def test_another_event_loop_has_its_own() -> None:
    """What one loop has opened is of no use in another."""
    closed = Closed()
    shared = SharedInLoop(lambda: ["it"], closed.close)

    async def use() -> list[str]:
        async with shared.use() as there:
            return there

    async with shared.use() as here:
        there = await asyncio.to_thread(lambda: asyncio.run(use()))
        assert there is not here
        assert [one is there for one in closed] == [True]


async def _failing(text: str) -> int:
    raise ValueError(text)


async def test_all_are_completed_in_their_order() -> None:
    """Whichever ends first."""
    assert await all_completed(asyncio.sleep(0.01, 1), asyncio.sleep(0, "a"), asyncio.sleep(0, 2.0)) == (1, "a", 2.0)
    assert await all_completed() == ()


async def test_none_is_left_behind_a_failure() -> None:
    """The others have ended when it is raised."""
    before = asyncio.all_tasks()
    with pytest.raises(ValueError, match="no"):
        await all_completed(asyncio.sleep(60), _failing("no"))
    assert asyncio.all_tasks() == before


async def test_each_end_is_reached_before_the_first_failure_is_raised() -> None:
    """A job whose end is refused keeps no other one."""
    ended: list[int] = []

    async def end(number: int) -> int:
        await asyncio.sleep(0.01)
        ended.append(number)
        return number

    with pytest.raises(ValueError, match="no"):
        await all_ended(end(1), _failing("no"), end(2), _failing("later"))
    assert ended == [1, 2]
    assert await all_ended(end(3), end(4)) == [3, 4]


async def test_a_cancellation_beside_a_failure_is_not_lost() -> None:
    """A task that goes on after failures still ends, where asyncio.gather tells it of the failure only."""

    async def tries() -> None:
        with pytest.raises(ValueError, match="no"):
            await all_completed(asyncio.sleep(60), _failing("no"))

    for steps in range(8):  # among them the one in which one has failed and nobody has been told
        trying = asyncio.create_task(tries())
        for _ in range(steps):
            await asyncio.sleep(0)
        if not trying.done():
            trying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await trying


@pytest.mark.parametrize("count", [2, 5])
async def test_of_several_that_end_at_once_the_first_counts(count: int) -> None:
    """An answer is not dropped for what only says that nobody waits for it any more."""
    for _ in range(20):
        assert await first_completed(*(asyncio.sleep(0, number) for number in range(count))) == 0


async def test_a_failure_counts_more_than_what_ends_with_it() -> None:
    """Nobody would learn of it else."""
    for _ in range(20):
        with pytest.raises(ValueError, match="no"):
            await first_completed(asyncio.sleep(0, 1), _failing("no"), asyncio.sleep(0, 2))
