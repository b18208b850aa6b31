"""How the shares of an endpoint's students are kept up."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.clock import LoopClock
from support.registry.followers import OneTeacher

from edl_runtime.discovery import feed as feeds
from edl_runtime.discovery.feed import Feed
from edl_runtime.registry.members import Member
from edl_runtime.registry.shares import shares


async def test_the_endpoint_goes_on_while_shares_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: else the leases of its students would run out meanwhile, and there is more to compute."""
    go = threading.Event()

    def held(
        teachers: list[Member], students: list[Member], avoided: dict[str, list[str]]
    ) -> dict[str, tuple[str, ...]]:
        assert go.wait(30)
        return shares(teachers, students, avoided)

    monkeypatch.setattr(feeds, "shares", held)
    feed = Feed(OneTeacher(), "p")
    feed.start()
    feed.add(Member(id="s", address="h:1"))
    for _ in range(100):
        await asyncio.sleep(0)
    assert feed.assignment("s") is None
    go.set()
    await asyncio.wait_for(feed.knows("s"), 30)
    found = feed.assignment("s")
    assert found is not None
    assert found.teachers == ("p:1",)
    await feed.stop()


async def test_a_burst_of_changes_is_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a thousand students come at once, shares are computed for the first of them and for all."""
    computed = []

    def counted(
        teachers: list[Member], students: list[Member], avoided: dict[str, list[str]]
    ) -> dict[str, tuple[str, ...]]:
        computed.append(len(students))
        return shares(teachers, students, avoided)

    monkeypatch.setattr(feeds, "shares", counted)
    clock = LoopClock(monkeypatch)
    feed = Feed(OneTeacher(), "p")
    feed.start()
    feed.add(Member(id="first", address="h:1"))
    await feed.knows("first")
    for number in range(1000):
        feed.add(Member(id=f"s{number}", address="h:1"))
        await clock.advance(0.0)
    assert computed == [1]
    await clock.advance(3600.0)  # it rests at least for as long as it has computed
    await feed.knows("s999")
    await feed.stop()
    assert computed == [1, 1001]
