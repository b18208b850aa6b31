"""The memory that requests take together."""

from __future__ import annotations

import asyncio

import pytest

from edl_runtime.gateway.errors import NoRoomError
from edl_runtime.gateway.room import Room


async def test_a_request_waits_until_others_have_made_room() -> None:
    """A smaller one goes ahead meanwhile; after its time the large one is told what is free."""
    room = Room(10 << 20)
    order: list[str] = []

    async def take(name: str, size: int) -> None:
        async with room.hold(size << 20, wait_s=60):
            order.append(name)

    async with room.hold(6 << 20, wait_s=0):
        large = asyncio.create_task(take("large", 5))
        await asyncio.sleep(0)
        await take("small", 4)
        with pytest.raises(NoRoomError, match="up to 7 MiB of memory, and others leave 4 of 10 MiB"):
            async with room.hold(7 << 20, wait_s=0):
                pass
    await large
    assert order == ["small", "large"]
