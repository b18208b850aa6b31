"""When a student that is connected counts as gone."""

from __future__ import annotations

import asyncio

import pytest
from support.clock import LoopClock
from support.registry.followers import OneTeacher

from edl_runtime.discovery.feed import Feed
from edl_runtime.discovery.hub import Connected
from edl_runtime.discovery.messages import SILENT_AFTER_S
from edl_runtime.errors import RegistryError
from edl_runtime.registry.members import Member


class HeldLease:
    """A lease that nobody refuses."""

    async def refused(self) -> RegistryError:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_student_stays_as_long_as_it_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word puts the end off by the whole limit, and nothing else does: an open connection is not enough."""
    clock = LoopClock(monkeypatch)
    feed = Feed(OneTeacher(), "p")
    feed.start()
    one = Connected(Member(id="s", address="h:1"), feed, HeldLease(), asyncio.Event())  # type: ignore[arg-type]
    over = asyncio.create_task(one.over())
    for _ in range(3):
        await clock.advance(SILENT_AFTER_S - 0.1)
        one.hear({})
    await clock.advance(SILENT_AFTER_S - 0.1)
    assert not over.done()
    await clock.advance(0.2)
    assert over.done()
    assert over.result() == f"it said nothing for {SILENT_AFTER_S:.0f} s"
    await feed.stop()
