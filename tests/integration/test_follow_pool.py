"""Students of a pool, on Redis and behind a discovery endpoint: what they are told, and what they tell."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
import pytest
from support.network.proxy import running_proxy
from support.registry.discovery_process import running_discovery
from support.registry.followers import PATIENCE_S, POOL, discovery_settings, registered, student, wait_for_quarantine

from edl_runtime.distill import discovery
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.members import assign_teachers
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

if TYPE_CHECKING:
    from edl_runtime.store.redis_server import RedisServer

TEACHER = "127.0.0.1:1"
LEASE_S = 600.0


@pytest.fixture(scope="module")
def settings(redis_server: RedisServer) -> RuntimeSettings:
    """Of one registry, which every test leaves empty; leases outlast a busy machine."""
    return RuntimeSettings(redis_url=redis_server.url, namespace=f"test-{uuid.uuid4().hex[:8]}", lease_ttl_s=LEASE_S)


@pytest.fixture(scope="module")
def endpoint_url(settings: RuntimeSettings) -> Iterator[str]:
    with running_discovery(settings) as endpoint:
        yield endpoint.url


async def test_quarantines_are_shown_while_they_last(
    settings: RuntimeSettings, endpoint_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others see which teachers students keep from work, for as long as they do and no longer, and by how many."""
    monkeypatch.setattr(discovery, "REPORT_EVERY_S", 0.05)
    away = discovery_settings(endpoint_url, settings)
    async with registered(settings, TEACHER, ttl_s=LEASE_S), student(settings) as first, student(away) as second:
        first.quarantined[TEACHER] = second.quarantined[TEACHER] = "garbage"
        await wait_for_quarantine(settings, "garbage (by 2 students)")
        first.quarantined.clear()
        await wait_for_quarantine(settings, "garbage (by 1 student)")
        second.quarantined.clear()
        await wait_for_quarantine(settings, "None")
        second.quarantined[TEACHER] = "silent"
        await wait_for_quarantine(settings, "silent (by 1 student)")
    async with registered(settings, TEACHER, ttl_s=LEASE_S):
        await wait_for_quarantine(settings, "None")


async def test_a_student_without_teachers_outlives_an_outage(
    settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that begins as it looks which other pools there are, to say so; it uses teachers that come later."""
    url, known_pools = urlsplit(settings.redis_url), Directory.known_pools

    async def cut_off(directory: Directory) -> list[str]:
        monkeypatch.undo()
        proxy.cut()
        return await known_pools(directory)

    with running_proxy(url.hostname or "", url.port or 6379) as proxy:
        monkeypatch.setattr(Directory, "known_pools", cut_off)
        through = settings.redis_url.replace(f":{url.port}", f":{proxy.port}")
        async with student(msgspec.structs.replace(settings, redis_url=through)) as one:
            async with asyncio.timeout(PATIENCE_S):
                while "no teacher is registered" not in one.outages:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.01)
            proxy.mend()
            async with registered(settings, TEACHER, ttl_s=LEASE_S):
                await one.wait_for(lambda teachers: teachers == (TEACHER,))


async def test_students_share_by_one_rule_wherever_they_are(settings: RuntimeSettings, endpoint_url: str) -> None:
    """Two on Redis and two behind an endpoint use every teacher, none twice, and as everybody computes it."""
    teachers = [f"127.0.0.1:{port}" for port in range(1, 9)]
    away = discovery_settings(endpoint_url, settings)
    async with registered(settings, *teachers, ttl_s=LEASE_S), contextlib.AsyncExitStack() as stack:
        students = [await stack.enter_async_context(student(where)) for where in (settings, away, settings, away)]
        for one in students:
            await one.wait_for(lambda teachers: 0 < len(teachers) <= 2)  # which nobody has before all are there
        async with connect(settings.redis_url) as client:
            directory = Directory(client, settings.namespace)
            by_all = assign_teachers(await directory.members(POOL), await directory.members(POOL, "students"))
        async with asyncio.timeout(PATIENCE_S):
            while sorted(one.teachers or () for one in students) != sorted(by_all.values()):  # noqa: ASYNC110 - they tell nobody
                await asyncio.sleep(0.01)
        assert sorted(address for mine in by_all.values() for address in mine) == teachers


async def test_a_student_whose_only_teacher_is_bad_gets_another_meanwhile(
    settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its own, to notice when that is good again, and then has that alone."""
    monkeypatch.setattr(discovery, "REPORT_EVERY_S", 0.05)
    async with (
        registered(settings, "a:1", "b:1", ttl_s=LEASE_S),
        student(settings) as one,
        student(settings) as other,
    ):
        await one.wait_for(lambda teachers: len(teachers) == 1)
        await other.wait_for(lambda teachers: len(teachers) == 1)
        [mine] = one.teachers or ()
        one.quarantined[mine] = "garbage"
        await one.wait_for(lambda teachers: teachers == ("a:1", "b:1"))
        assert len(other.teachers or ()) == 1
        one.quarantined.clear()
        await one.wait_for(lambda teachers: teachers == (mine,))


async def test_a_student_gets_as_many_teachers_as_it_wants(settings: RuntimeSettings) -> None:
    """Its limit is known to all, and the rest of the pool is another's."""
    async with registered(settings, "a:1", "b:1", "c:1", ttl_s=LEASE_S), student(settings, at_most=1) as modest:
        await modest.wait_for(lambda teachers: len(teachers) == 1)
        async with student(settings) as other:
            await other.wait_for(lambda teachers: len(teachers) == 2)
            assert modest.teachers is not None
            assert len(modest.teachers) == 1
