"""Instances that starve: they renew their leases late, and each generation costs them all another start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from support.elastic.group_simulation import LEASE_S, TICK_S, World, starving
from support.redis_clock import take_time_from_a_key

from edl_runtime.elastic.rendezvous.generation import Timeouts, TrainerMember
from edl_runtime.elastic.rendezvous.redis_store import RendezvousStore, read_events
from edl_runtime.specs import Bounds
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

pytestmark = pytest.mark.slow

STORM_S = 207.0


@pytest.fixture
async def world(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A job without instances yet, in a Redis where no time passes but the world's."""
    take_time_from_a_key(monkeypatch)
    async with connect(own_redis.url) as client:
        world = World(client, Bounds(1, 32))
        world.times = Timeouts()
        yield world


async def start(world: World, instances: int, *, plain: bool) -> None:
    for index in range(instances):
        await world.start(index, plain=plain)


async def test_leases_stretch_where_all_are_late(world: World) -> None:
    """32 instances of a script that stays as it is train on in the generation that has all; one event says why."""
    world.starve = starving(6.0)
    await start(world, 32, plain=True)
    await world.run(STORM_S / 2)
    assert len(world.published) <= 3
    assert len(world.published[world.highest].members) == 32
    told = [event.reason for event in await read_events(world.client, "n", "job") if event.kind in ("late", "gone")]
    assert [reason.partition(",")[0] for reason in told] == ["most instances renew their leases late"]


async def test_generations_that_get_nowhere_come_ever_more_slowly(world: World) -> None:
    """Where some are late and the others are not, these lose their leases again and again."""
    late = starving(12.0)
    world.starve = lambda index: late(index) if index < 2 else 0.0
    await start(world, 5, plain=True)
    await world.run(STORM_S)
    assert len(world.published) <= 14
    for before, after in pairwise(world.published.values()):
        assert after.proposed_at - before.proposed_at >= world.times.apart_s(after.setbacks)


@pytest.mark.parametrize("longest_s", [4.0, 6.0])
@pytest.mark.parametrize("instances", [1, 2, 8])
async def test_a_stray_submission_takes_nothing_from_a_slow_job(world: World, instances: int, longest_s: float) -> None:
    """Instances that are later than their first lease are not dead, whoever else would like to have the job."""
    world.starve = starving(longest_s)
    await start(world, instances, plain=True)
    await world.run(STORM_S / 4)
    before = world.highest
    stray = RendezvousStore(world.client, "n", "job", run="stray", ttl_s=LEASE_S)
    stray._id = "0-stray"
    record = TrainerMember(id=stray._id, index=0)
    for _ in range(round(STORM_S / 4 / TICK_S)):
        assert (await stray._heartbeat(record))[0] == "taken"
        await world.run(TICK_S)
    assert "gone" not in [event.kind for event in await read_events(world.client, "n", "job")]
    assert world.highest == before


@pytest.mark.parametrize("dead", [1, 5])
async def test_the_dead_are_noticed_within_their_lease(world: World, dead: int) -> None:
    """Be it one or most of them, also if all were late a while ago; and nothing keeps the first from beginning."""
    await start(world, 8, plain=True)
    await world.run(1.5)
    assert len(world.published[world.highest].members) == 8
    world.starve = starving(5.0)
    await world.run(20.0)
    world.feed()
    await world.run(30.0)
    before = world.highest
    for agent in world.agents[:dead]:
        agent.alive = False
    await world.run(LEASE_S + 2 * TICK_S)
    assert world.highest == before + 1
    assert len(world.published[world.highest].members) == 8 - dead
