"""Answers of teachers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx

from edl_runtime.gateway.http import _pieces
from edl_runtime.protocol.asgi_server import CHUNKS_A_TURN


class Chunks(httpx.AsyncByteStream):
    """A body of one-byte chunks that are all there already."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(100 * CHUNKS_A_TURN):
            yield b"x"


async def test_an_answer_in_small_chunks_leaves_turns_to_others() -> None:
    """However many have come at once."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    others = asyncio.create_task(count_turns())
    body = b"".join([piece async for piece in _pieces(httpx.Response(200, stream=Chunks()))])
    others.cancel()
    assert body == b"x" * (100 * CHUNKS_A_TURN)
    assert turns >= 99
