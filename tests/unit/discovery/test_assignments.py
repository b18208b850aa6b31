"""How an endpoint keeps up the shares of its students, and when one that is connected counts as gone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.clock import LoopClock
from support.registry.followers import OneTeacher

from edl_runtime.discovery import assignments as assignments_module
from edl_runtime.discovery.app import CLOSE_WITHIN_S, AssignmentStream
from edl_runtime.discovery.assignments import SILENT_AFTER_S, Assignment, PoolAssignments, StudentSession
from edl_runtime.pool_reports import StudentReport
from edl_runtime.registry.lease import Lease
from edl_runtime.registry.members import Member, assign_teachers


@pytest.fixture
async def feed() -> AsyncIterator[PoolAssignments]:
    made = PoolAssignments(OneTeacher(), "p")
    yield made
    await made.stop()


async def test_the_event_loop_runs_while_assignments_are_computed(
    feed: PoolAssignments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are: else the leases of its students would run out meanwhile, and there is more to compute."""
    go = threading.Event()

    def held(*given: Any) -> dict[str, tuple[str, ...]]:
        assert go.wait(30)
        return assign_teachers(*given)

    monkeypatch.setattr(assignments_module, "assign_teachers", held)
    feed.start()
    feed.add(Member(id="s", address="h:1"))
    for _ in range(100):
        await asyncio.sleep(0)
    assert feed.assignment("s") is None
    go.set()
    await asyncio.wait_for(feed.wait_assigned("s"), 30)
    found = feed.assignment("s")
    assert found is not None
    assert found.teachers == ("p:1",)


async def test_a_burst_of_changes_is_computed_together(feed: PoolAssignments, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a thousand students come at once, shares are computed for the first of them and for all."""
    computed = []

    def counted(teachers: list[Member], students: list[Member], avoided: Any) -> dict[str, tuple[str, ...]]:
        computed.append(len(students))
        return assign_teachers(teachers, students, avoided)

    monkeypatch.setattr(assignments_module, "assign_teachers", counted)
    clock = LoopClock(monkeypatch)
    feed.start()
    feed.add(Member(id="first", address="h:1"))
    await feed.wait_assigned("first")
    for number in range(1000):
        feed.add(Member(id=f"s{number}", address="h:1"))
        await clock.advance(0.0)
    assert computed == [1]
    await clock.advance(3600.0)  # it rests at least for as long as it has computed
    await feed.wait_assigned("s999")
    assert computed == [1, 1001]


async def test_a_computation_is_followed_by_an_equally_long_pause(
    feed: PoolAssignments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases have to be renewed meanwhile; and who says again what it has said costs no computation."""
    now_s = 0.0
    computed = 0

    async def slow(compute: Callable[..., object], *given: object) -> object:
        nonlocal now_s, computed
        now_s += 10.0
        computed += 1
        return compute(*given)

    monkeypatch.setattr(assignments_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(asyncio, "to_thread", slow)
    clock = LoopClock(monkeypatch)
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


async def test_a_student_that_reconnected_stays_when_its_earlier_stream_ends(feed: PoolAssignments) -> None:
    """Whether or not the registry lists it."""
    earlier, later = Member(id="s", address="h:1"), Member(id="s", address="h:2")
    feed.start()
    feed.add(earlier)
    await asyncio.wait_for(feed.wait_assigned("s"), 30)
    feed.add(later)
    feed.remove(earlier)
    await asyncio.wait_for(feed.wait_computed(), 30)
    assert feed.assignment("s") is not None
    feed.remove(later)
    await asyncio.wait_for(feed.wait_computed(), 30)
    assert feed.assignment("s") is None


async def test_a_student_stays_while_it_sends_reports(feed: PoolAssignments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word puts the end off by the whole limit, and nothing else does: an open connection is not enough."""
    clock = LoopClock(monkeypatch)
    feed.start()
    lease = cast("Lease", SimpleNamespace(wait_rejected=asyncio.Event().wait))  # nobody refuses it
    one = StudentSession(Member(id="s", address="h:1"), feed, lease, asyncio.Event())
    over = asyncio.create_task(one.wait_until_closed())
    for _ in range(3):
        await clock.advance(SILENT_AFTER_S - 0.1)
        one.note_report(StudentReport())
    await clock.advance(SILENT_AFTER_S - 0.1)
    assert not over.done()
    await clock.advance(0.2)
    assert over.done()
    assert over.result() == f"it sent no status for {SILENT_AFTER_S:.0f} s"


class OverAtOnce:
    """A registry, and a student that it lets go as soon as it is connected."""

    @contextlib.asynccontextmanager
    async def connect(self, *_: object) -> AsyncIterator[OverAtOnce]:
        yield self

    async def assignments(self) -> AsyncGenerator[Assignment, None]:
        await asyncio.Event().wait()
        yield Assignment((), students=0, listed=0)

    async def wait_until_closed(self) -> str:
        return "it said nothing"


async def test_a_client_that_does_not_read_can_not_delay_the_end_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
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

    ended = asyncio.create_task(AssignmentStream(OverAtOnce())(scope, receive, send))  # type: ignore[arg-type]
    await clock.advance(0.0)
    await clock.advance(0.9 * CLOSE_WITHIN_S)
    assert not ended.done()
    await clock.advance(0.2 * CLOSE_WITHIN_S)
    assert ended.done()
