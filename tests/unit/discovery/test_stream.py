"""A student's stream, without a network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from support.clock import LoopClock

from edl_runtime.discovery.messages import Assignment
from edl_runtime.discovery.stream import LAST_WORD_S, Stream
from edl_runtime.registry.members import Member


class OverAtOnce:
    """A hub, and a student that it lets go as soon as it is connected."""

    @contextlib.asynccontextmanager
    async def connect(self, _pool: str, _student: Member) -> AsyncIterator[OverAtOnce]:
        yield self

    async def assignments(self) -> AsyncGenerator[Assignment, None]:
        await asyncio.Event().wait()
        yield Assignment((), students=0, listed=0)

    async def over(self) -> str:
        return "it said nothing"


async def test_who_does_not_take_the_end_of_its_stream_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not be reading at all."""
    clock = LoopClock(monkeypatch)
    scope = {"type": "http", "method": "GET", "query_string": b"", "headers": []}
    scope["path_params"] = {"pool": "p", "student": "s"}

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def send(message: Any) -> None:
        if message.get("more_body") is False:
            await asyncio.Event().wait()

    ended = asyncio.create_task(Stream(OverAtOnce())(scope, receive, send))  # type: ignore[arg-type]
    await clock.advance(0.0)
    await clock.advance(0.9 * LAST_WORD_S)
    assert not ended.done()
    await clock.advance(0.2 * LAST_WORD_S)
    assert ended.done()
