"""How the shares of an endpoint's students are kept up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

import pytest

from edl_runtime.discovery import feed as feeds
from edl_runtime.discovery.feed import Feed
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.members import Member
from edl_runtime.registry.shares import shares


class OneTeacher(Directory):
    """A registry that lists one teacher, no students, and never anything else."""

    def __init__(self) -> None:
        pass

    async def watch(self, pool: str, role: str = "teachers") -> AsyncGenerator[list[Member], None]:
        yield [Member(id="t", address=f"{pool}:1")] if role == "teachers" else []
        await asyncio.Event().wait()


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
    feed = Feed(OneTeacher(), "p")
    feed.start()
    feed.add(Member(id="first", address="h:1"))
    await asyncio.wait_for(feed.knows("first"), 30)
    for number in range(1000):
        feed.add(Member(id=f"s{number}", address="h:1"))
        if number % 100 == 0:
            await asyncio.sleep(0)
    await asyncio.wait_for(feed.knows("s999"), 30)
    await feed.stop()
    assert computed[-1] == 1001
    assert len(computed) <= 3
