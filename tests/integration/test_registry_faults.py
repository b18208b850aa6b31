"""Members that die; a Redis emptied, killed and refusing to write.

Nothing here is told by how long it took: what may not be found by looking from time to time is looked for once an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from edl_runtime.registry import directory as directory_module
from edl_runtime.registry import lease as lease_module
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import Lease, hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.store import keys
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import connect, run_script
from edl_runtime.store.redis_server import RedisServer

if TYPE_CHECKING:
    from redis.asyncio import Redis

PATIENCE_S = 60.0
HOUR_S = 3600.0
PARTIES = 3
"""Two members and a watcher."""


@pytest.fixture(autouse=True)
def _hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher looks when there is news only."""
    monkeypatch.setattr(directory_module, "POLL_EVERY_S", HOUR_S)
    monkeypatch.setattr(lease_module, "RENEW_EVERY_S", 0.1)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher keeps whom Redis forgot for as long as it takes them to come back."""
    monkeypatch.setattr(directory_module, "SETTLE_S", HOUR_S)


@pytest.fixture
async def client(own_redis: RedisServer) -> AsyncIterator[Redis]:
    async with connect(own_redis.url) as client:
        yield client


@pytest.fixture
async def watch(client: Redis) -> AsyncIterator[AsyncGenerator[list[Member], None]]:
    async with contextlib.aclosing(Directory(client, "n").watch("pool")) as changes:
        yield changes


@contextlib.asynccontextmanager
async def members(client: Redis, *names: str, ttl_s: float = 60.0) -> AsyncIterator[dict[str, Lease]]:
    """Hold the lease of each name in this process."""
    async with contextlib.AsyncExitStack() as stack:
        service = Service("n", "pool")
        held = [hold_lease(client, service, Member(id=name, address=f"{name}:1"), ttl_s=ttl_s) for name in names]
        yield {name: await stack.enter_async_context(lease) for name, lease in zip(names, held, strict=True)}


async def die(client: Redis, ttl_s: float) -> None:
    """Register a member that never renews its lease."""
    record = '{"id":"dead","address":"d:1"}'
    await run_script(
        client, "register", keys.service_keys(Service("n", "pool")), ["dead", int(1000 * ttl_s), record, ""]
    )


async def until(changes: AsyncGenerator[list[Member], None], *wanted: str) -> None:
    """Wait until the watcher sees exactly the members `wanted`."""
    async with asyncio.timeout(PATIENCE_S):
        async for members in changes:
            if [member.id for member in members] == list(wanted):
                return
    pytest.fail("the watch ended")


async def shown_until_anew(changes: AsyncGenerator[list[Member], None], leases: Mapping[str, Lease]) -> list[list[str]]:
    """Return what the watcher shows until all members are registered anew."""
    before = max(lease.fence for lease in leases.values())
    seen: list[list[str]] = []
    async with asyncio.timeout(PATIENCE_S):
        async for listed in changes:
            seen.append([member.id for member in listed])
            if min(member.fence for member in listed) > before:
                return seen
    pytest.fail("the watch ended")


@pytest.mark.usefixtures("_patient")
async def test_a_killed_teacher_goes_at_its_lease_s_end_and_one_that_leaves_at_once(
    client: Redis, watch: AsyncGenerator[list[Member], None]
) -> None:
    """A watcher sees who joins and leaves by their events, and a death at the deadline, without polling."""
    await until(watch)
    await die(client, ttl_s=HOUR_S)
    await until(watch, "dead")
    leases = keys.service_key(Service("n", "pool"), "leases")
    await client.zincrby(leases, -1000 * (HOUR_S - 2.0), "dead")  # a watcher sees when that is by the next event
    async with members(client, "leaves", ttl_s=HOUR_S):
        await until(watch, "leaves")
    await until(watch)


@pytest.mark.usefixtures("_patient")
async def test_members_are_back_after_redis_was_emptied(
    client: Redis, watch: AsyncGenerator[list[Member], None]
) -> None:
    """However long its lease, every member registers anew, and the watcher's list never shrinks meanwhile."""
    async with members(client, "a", "b", "c", ttl_s=HOUR_S) as leases:
        await until(watch, "a", "b", "c")
        shown = asyncio.create_task(shown_until_anew(watch, leases))
        await client.flushall()
        seen = await shown
    assert seen == [["a", "b", "c"]] * len(seen)


@pytest.mark.usefixtures("_patient")
async def test_members_are_back_after_redis_came_back_empty(
    own_redis: RedisServer, client: Redis, watch: AsyncGenerator[list[Member], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Redis is away the last list stands; nothing is lost by its restart, and each party says so once."""
    for module in (lease_module, directory_module):
        monkeypatch.setattr(module, "RETRY_EVERY_S", 0.05)
    with capture_logs() as logs:
        async with members(client, "a", "b") as leases:
            await until(watch, "a", "b")
            shown = asyncio.create_task(shown_until_anew(watch, leases))
            own_redis.kill()
            with pytest.raises(RegistryUnavailableError, match=f"127.0.0.1:{own_redis.port}"):
                await Directory(client, "n").members("pool")
            await until_all_know(logs)
            await asyncio.sleep(0.2)  # for attempts that say nothing
            await asyncio.to_thread(own_redis.start)
            seen = await shown
    assert seen == [["a", "b"]] * len(seen)
    assert times_away(logs) == PARTIES


def times_away(logs: Sequence[Mapping[str, Any]]) -> int:
    """Return how often somebody said that Redis is away."""
    return sum(entry["event"] == "registry.unavailable" for entry in logs)


async def until_all_know(logs: Sequence[Mapping[str, Any]]) -> None:
    """Wait until both members and the watcher have said that Redis is away."""
    async with asyncio.timeout(PATIENCE_S):
        while times_away(logs) < PARTIES:  # noqa: ASYNC110 - a log tells nobody
            await asyncio.sleep(0.01)


async def test_a_member_that_died_with_redis_leaves_the_list_when_it_does_not_come_back(
    own_redis: RedisServer, client: Redis, watch: AsyncGenerator[list[Member], None]
) -> None:
    """Being forgotten by Redis is no way to stay listed: it is looked again as soon as all could be back."""
    await die(client, ttl_s=HOUR_S)
    async with members(client, "lives", ttl_s=HOUR_S):
        await until(watch, "dead", "lives")
        own_redis.kill()
        await asyncio.to_thread(own_redis.start)
        await until(watch, "lives")


@pytest.mark.usefixtures("_patient")
async def test_a_redis_that_refuses_writes_is_ridden_out(
    own_redis: RedisServer, client: Redis, watch: AsyncGenerator[list[Member], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover's usual state, longer than a lease: whoever joins is told, who is in stays listed and comes back."""
    monkeypatch.setattr(directory_module, "POLL_EVERY_S", 0.1)
    with capture_logs() as logs:
        async with members(client, "a", "b") as leases:
            await until(watch, "a", "b")
            shown = asyncio.create_task(shown_until_anew(watch, leases))
            await asyncio.sleep(0)
            async with client.pipeline(transaction=True) as at_once:  # leases that can't be renewed any more
                at_once.zadd(keys.service_key(Service("n", "pool"), "leases"), {"a": 1, "b": 1})
                at_once.config_set("min-replicas-to-write", 1)
                await at_once.execute()
            with pytest.raises(RegistryUnavailableError, match=f"127.0.0.1:{own_redis.port} .*NOREPLICAS"):
                async with members(client, "c"):
                    pytest.fail("registered though nothing can be written")
            await until_all_know(logs)
            with pytest.raises(RegistryUnavailableError, match="NOREPLICAS"):
                await Directory(client, "n").members("pool")  # who has run out can't be struck off
            await client.config_set("min-replicas-to-write", 0)
            seen = await shown
    assert seen == [["a", "b"]] * len(seen)


async def test_leaving_while_redis_is_away_is_no_error(own_redis: RedisServer, client: Redis) -> None:
    """A block that ends without Redis ends all the same."""
    async with asyncio.timeout(PATIENCE_S), members(client, "a"):
        own_redis.kill()
