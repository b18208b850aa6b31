"""How the shares of an endpoint's students are kept up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

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


async def test_it_rests_as_long_as_it_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases have to be renewed meanwhile; and who says again what it has said costs no computation."""
    now_s = 0.0
    computed = 0

    async def slow(compute: Callable[..., object], *given: object) -> object:
        nonlocal now_s, computed
        now_s += 10.0
        computed += 1
        return compute(*given)

    monkeypatch.setattr(feeds, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(asyncio, "to_thread", slow)
    clock = LoopClock(monkeypatch)
    feed = Feed(OneTeacher(), "p")
    feed.start()
    feed.add(Member(id="s", address="h:1"))
    await clock.advance(0.0)
    feed.avoid("s", ["p:1"])
    await clock.advance(9.9)
    assert computed == 1
    await clock.advance(0.2)
    assert computed == 2
    feed.avoid("s", ["p:1"])
    await clock.advance(3600.0)
    assert computed == 2
    await feed.stop()


async def test_a_student_that_came_again_stays_when_its_earlier_stream_ends() -> None:
    """Whether or not the registry lists it."""
    feed = Feed(OneTeacher(), "p")
    feed.start()
    earlier, later = Member(id="s", address="h:1"), Member(id="s", address="h:2")
    feed.add(earlier)
    await asyncio.wait_for(feed.knows("s"), 30)
    feed.add(later)
    feed.remove(earlier)
    await asyncio.wait_for(feed.news(), 30)
    assert feed.assignment("s") is not None
    feed.remove(later)
    await asyncio.wait_for(feed.news(), 30)
    assert feed.assignment("s") is None
    await feed.stop()
