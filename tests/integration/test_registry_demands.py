"""What members report, in a real Redis."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
import pytest

from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport
from edl_runtime.registry.demands import STALE_S, demands
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.store import keys
from edl_runtime.store.client import connect
from edl_runtime.store.keys import Service

if TYPE_CHECKING:
    from redis.asyncio import Redis

BUSY = TeacherReport(busy=0.75, over_s=10.0)
WAITING = StudentReport(waiting=0.5, asked=1.5, samples_per_s=80.0, teachers=2, want=3, over_s=10.0)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    async with connect(redis_url) as client:
        yield client


async def said(client: Redis, namespace: str, *pools: str) -> dict[str, PoolDemand]:
    """Return what is reported, whenever somebody came or went."""
    found = await demands(client, namespace, pools)
    return {pool: msgspec.structs.replace(demand, settled_s=math.inf) for pool, demand in found.items()}


async def until(client: Redis, namespace: str, wanted: PoolDemand) -> None:
    async with asyncio.timeout(10):
        while (await said(client, namespace, "p"))["p"] != wanted:  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.01)


async def test_reports_come_with_the_beat_and_go_with_the_lease(client: Redis, namespace: str) -> None:
    """Those of all pools at once; a member that says nothing is listed, and so is a pool that nobody is in."""
    teachers, students = Service(namespace, "p"), Service(namespace, "p", "students")
    told = PoolDemand(teachers={"t0": BUSY, "t1": None}, students={"s0": WAITING})
    async with (
        hold_lease(client, teachers, Member(id="t0", address="h:1"), ttl_s=0.6, says=lambda: BUSY),
        hold_lease(client, teachers, Member(id="t1", address="h:2"), ttl_s=0.6),
        hold_lease(client, students, Member(id="s0", address="h:3"), ttl_s=0.6, says=lambda: WAITING),
        hold_lease(client, Service(namespace, "q"), Member(id="t2", address="h:4"), ttl_s=0.6),
    ):
        await until(client, namespace, told)
        assert await said(client, namespace, "p", "none", "q") == {
            "p": told,
            "none": PoolDemand(),
            "q": PoolDemand(teachers={"t2": None}),
        }
    assert await said(client, namespace, "p") == {"p": PoolDemand()}
    assert await client.exists(keys.said(teachers), keys.said(students)) == 0


async def test_a_dead_member_s_report_is_gone_with_it(client: Redis, namespace: str) -> None:
    """It counts no longer than the lease, and one who registers anew has said nothing yet."""
    service = Service(namespace, "p")
    lease = hold_lease(client, service, Member(id="t0", address="h:1"), ttl_s=0.3, says=lambda: BUSY)
    async with lease:
        await until(client, namespace, PoolDemand(teachers={"t0": BUSY}))
        async with hold_lease(client, service, Member(id="t0", address="h:1"), ttl_s=60):
            assert await said(client, namespace, "p") == {"p": PoolDemand(teachers={"t0": None})}


async def test_an_old_or_unreadable_report_is_none(client: Redis, namespace: str) -> None:
    """By Redis's clock; what something else wrote hides nobody's."""
    service = Service(namespace, "p")
    seconds, micros = await client.time()
    now_s = seconds + micros / 1e6
    async with hold_lease(client, service, Member(id="t0", address="h:1"), ttl_s=60):
        await client.hset(keys.said(service), "t0", f'{{"at":{now_s - STALE_S - 1},"busy":0.5,"over_s":10}}')
        assert await said(client, namespace, "p") == {"p": PoolDemand(teachers={"t0": None})}
        await client.hset(keys.said(service), "t0", f'{{"at":{now_s},"busy":"much"}}')
        assert await said(client, namespace, "p") == {"p": PoolDemand(teachers={"t0": None})}
        await client.hset(keys.said(service), "t0", f'{{"at":{now_s},"busy":0.5,"over_s":10,"new":1}}')
        found = (await demands(client, namespace, ["p"]))["p"]
        assert found.busy == 0.5


async def test_it_is_known_when_somebody_last_came_or_went(client: Redis, namespace: str) -> None:
    """Of either role; of a pool that there never was, nobody has."""
    async with hold_lease(client, Service(namespace, "p"), Member(id="t0", address="h:1"), ttl_s=60):
        await asyncio.sleep(0.3)
        assert 0.3 <= (await demands(client, namespace, ["p"]))["p"].settled_s < 5
        async with hold_lease(client, Service(namespace, "p", "students"), Member(id="s0", address="h:2"), ttl_s=60):
            assert (await demands(client, namespace, ["p"]))["p"].settled_s < 0.3
            assert (await demands(client, namespace, ["q"]))["q"].settled_s == math.inf


async def test_without_redis_it_is_an_error_of_ours() -> None:
    """It names the Redis that is away; of no pools nothing is asked."""
    async with connect("redis://127.0.0.1:1/0") as client:
        assert await demands(client, "n", []) == {}
        with pytest.raises(RegistryUnavailableError, match=r"127\.0\.0\.1:1"):
            await demands(client, "n", ["p"])
