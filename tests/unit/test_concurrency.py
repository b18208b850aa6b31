"""What users of one event loop share."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from edl_runtime.concurrency import SharedInLoop


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
