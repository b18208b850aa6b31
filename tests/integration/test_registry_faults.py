"""Members in processes of their own, killed; a Redis emptied, killed and stopped. The measured times are printed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs
from support.paths import SUPPORT

from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.registry.directory import LOOK_EVERY_S, Directory
from edl_runtime.registry.lease import Lease, hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.store.client import connect
from edl_runtime.store.keys import Service
from edl_runtime.store.server import RedisServer

if TYPE_CHECKING:
    from redis.asyncio import Redis

MEMBER = SUPPORT / "registry" / "member_process.py"
LEASE_S = 3.0
"""The default, by which the processes of these tests register."""
SLACK_S = 1.0
"""What a machine that is busy with other tests may add."""


@pytest.fixture
async def directory(own_redis: RedisServer) -> AsyncIterator[Directory]:
    async with connect(own_redis.url) as client:
        yield Directory(client, "n")


@pytest.fixture
async def watch(directory: Directory) -> AsyncIterator[AsyncGenerator[list[Member], None]]:
    async with contextlib.aclosing(directory.watch("pool")) as changes:
        yield changes


@contextlib.asynccontextmanager
async def member_process(server: RedisServer, name: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, float]]:
    """Run a member in a process of its own; give it and the moment when it was registered."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(MEMBER),
        "n",
        "pool",
        name,
        env={**os.environ, "EDL_REDIS_URL": server.url},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            with contextlib.suppress(ValueError):  # a line of the log
                yield process, float(line)
                break
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@contextlib.asynccontextmanager
async def members(client: Redis, *names: str, ttl_s: float = LEASE_S) -> AsyncIterator[dict[str, Lease]]:
    """Hold the lease of each name in this process."""
    async with contextlib.AsyncExitStack() as stack:
        service = Service("n", "pool")
        held = [hold_lease(client, service, Member(id=name, address=f"{name}:1"), ttl_s=ttl_s) for name in names]
        yield {name: await stack.enter_async_context(lease) for name, lease in zip(names, held, strict=True)}


async def until(changes: AsyncGenerator[list[Member], None], *wanted: str, within_s: float = 20.0) -> float:
    """Wait until the watcher sees exactly the members `wanted`; return when that was."""
    async with asyncio.timeout(within_s):
        async for members in changes:
            if [member.id for member in members] == list(wanted):
                return time.monotonic()
    pytest.fail("the watch ended")


@pytest.mark.slow
async def test_a_new_teacher_is_seen_within_a_second_and_a_killed_one_gone_within_its_lease(
    own_redis: RedisServer, directory: Directory, watch: AsyncGenerator[list[Member], None]
) -> None:
    """A watcher sees both without polling: the joining by its event, the death at the deadline of the lease."""
    await until(watch)
    async with member_process(own_redis, "a") as (process, ready_at):
        seen_s = await until(watch, "a") - ready_at
        process.kill()
        killed_at = time.monotonic()
        gone_s = await until(watch) - killed_at
    print(f"new teacher seen after {seen_s:.3f} s, killed one gone after {gone_s:.2f} s")  # noqa: T201 - what was measured
    assert seen_s < 1 + SLACK_S
    assert gone_s < LEASE_S + SLACK_S
    assert await directory.members("pool") == []


@pytest.mark.slow
async def test_the_list_without_a_watcher_forgets_the_dead_too(own_redis: RedisServer, directory: Directory) -> None:
    """`members` never shows a lease that has run out, and a clean end leaves at once."""
    async with member_process(own_redis, "a") as (dies, _), member_process(own_redis, "b") as (leaves, _):
        assert [member.id for member in await directory.members("pool")] == ["a", "b"]
        assert leaves.stdin is not None
        leaves.stdin.close()
        assert await leaves.wait() == 0
        dies.kill()
        assert [member.id for member in await directory.members("pool")] == ["a"]
        await asyncio.sleep(LEASE_S)
        assert await directory.members("pool") == []


async def test_members_are_back_a_second_after_redis_was_emptied(
    own_redis: RedisServer, watch: AsyncGenerator[list[Member], None]
) -> None:
    """However long its lease, every member registers anew, and the watcher's list never shrinks meanwhile."""
    seen: list[list[str]] = []
    async with connect(own_redis.url) as client, members(client, "a", "b", "c", ttl_s=60) as leases:
        await until(watch, "a", "b", "c")
        before = max(lease.fence for lease in leases.values())
        await client.flushall()
        emptied_at = time.monotonic()
        back_s = await asyncio.wait_for(follow(watch, seen, newer_than=before), 10) - emptied_at
    print(f"emptied Redis refilled after {back_s:.2f} s")  # noqa: T201 - what was measured
    assert seen == [["a", "b", "c"]] * len(seen)
    assert back_s < 1 + SLACK_S


async def test_members_are_back_a_second_after_redis_came_back_empty(
    own_redis: RedisServer, watch: AsyncGenerator[list[Member], None]
) -> None:
    """While Redis is away the last list stands; nothing is lost by its restart, and each party says so once."""
    seen: list[list[str]] = []
    with capture_logs() as logs:
        async with connect(own_redis.url) as client, members(client, "a", "b") as leases:
            await until(watch, "a", "b")
            before = max(lease.fence for lease in leases.values())
            following = asyncio.create_task(follow(watch, seen, newer_than=before))
            own_redis.kill()
            with pytest.raises(RegistryUnavailableError, match=f"127.0.0.1:{own_redis.port}"):
                await Directory(client, "n").members("pool")
            async with asyncio.timeout(10):
                while times_away(logs) < 3:  # noqa: ASYNC110 - a log tells nobody
                    await asyncio.sleep(0.01)
            await asyncio.sleep(1.2)  # for attempts that say nothing
            assert seen == []
            await asyncio.to_thread(own_redis.start)
            back_at = time.monotonic()
            back_s = await asyncio.wait_for(following, 10) - back_at
    print(f"restarted Redis refilled after {back_s:.2f} s")  # noqa: T201 - what was measured
    assert seen == [["a", "b"]] * len(seen)
    assert back_s < 1 + SLACK_S
    assert times_away(logs) == 3  # two members, one watcher


def times_away(logs: Sequence[Mapping[str, Any]]) -> int:
    """Return how often somebody said that Redis is away."""
    return sum(entry["event"] == "registry.away" for entry in logs)


async def test_a_member_that_died_with_redis_leaves_the_list_when_it_does_not_come_back(
    own_redis: RedisServer, watch: AsyncGenerator[list[Member], None]
) -> None:
    """Being forgotten by Redis is no way to stay listed: it is looked again as soon as all could be back."""
    async with (
        connect(own_redis.url) as client,
        members(client, "lives", ttl_s=60),  # so that no lease that runs out is a reason to look
        member_process(own_redis, "dies") as (process, _),
    ):
        await until(watch, "dies", "lives")
        process.kill()
        await process.wait()
        own_redis.kill()
        await asyncio.to_thread(own_redis.start)
        await until(watch, "lives", within_s=LOOK_EVERY_S - SLACK_S)


@pytest.mark.slow
async def test_a_redis_that_refuses_writes_is_ridden_out(
    own_redis: RedisServer, directory: Directory, watch: AsyncGenerator[list[Member], None]
) -> None:
    """A failover's usual state, longer than a lease: whoever joins is told, who is in stays listed and comes back."""
    seen: list[list[str]] = []
    async with connect(own_redis.url) as client, members(client, "a", "b") as leases:
        await until(watch, "a", "b")
        before = max(lease.fence for lease in leases.values())
        following = asyncio.create_task(follow(watch, seen, newer_than=before))
        await client.config_set("min-replicas-to-write", 1)
        with pytest.raises(RegistryUnavailableError, match=f"127.0.0.1:{own_redis.port} .*NOREPLICAS"):
            async with members(client, "c"):
                pytest.fail("registered though nothing can be written")
        await asyncio.sleep(LEASE_S + 0.5)
        with pytest.raises(RegistryUnavailableError, match="NOREPLICAS"):
            await directory.members("pool")  # who has run out can't be struck off
        assert not following.done()
        await client.config_set("min-replicas-to-write", 0)
        await asyncio.wait_for(following, 10)
    assert seen == [["a", "b"]] * len(seen)


async def test_leaving_while_redis_is_away_is_no_error(own_redis: RedisServer) -> None:
    """A block that ends without Redis ends all the same, and soon."""
    async with connect(own_redis.url) as client, members(client, "a"):
        own_redis.kill()
        left_at = time.monotonic()
    assert time.monotonic() - left_at < 2 + SLACK_S


async def test_a_redis_that_is_silent_is_given_up_within_two_seconds(own_redis: RedisServer) -> None:
    """A stopped Redis accepts connections and never answers."""
    os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        async with connect(own_redis.url) as client:
            asked_at = time.monotonic()
            with pytest.raises(RegistryUnavailableError, match="silent"):
                async with members(client, "a"):
                    pytest.fail("registered with nobody")
            assert time.monotonic() - asked_at < 2 + SLACK_S
    finally:
        os.kill(own_redis.pid, signal.SIGCONT)


async def follow(changes: AsyncGenerator[list[Member], None], seen: list[list[str]], *, newer_than: int) -> float:
    """Note what the watcher shows until all members are registered anew; return when that was."""
    async for listed in changes:
        seen.append([member.id for member in listed])
        if min(member.fence for member in listed) > newer_than:
            return time.monotonic()
    pytest.fail("the watch ended")
