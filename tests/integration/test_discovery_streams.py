"""Students' streams of a real `edl discovery`: what is pushed, and when a student is let go."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

import httpx
import pytest
from support.registry.discovery_client import NAMESPACE, asking, member, stream, students, until, until_gone
from support.registry.discovery_process import Endpoint, running_discovery
from support.teachers.process import PATIENCE_S

from edl_runtime.discovery.app import build_app
from edl_runtime.discovery.hub import Hub
from edl_runtime.discovery.messages import SILENT_AFTER_S
from edl_runtime.discovery.server import POOL_LIMIT, REDIS_LIMIT
from edl_runtime.registry.members import Member
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.client import connect

PUSHED_WITHIN_S = 0.5
SLACK_S = 1.0
"""What a machine that is busy with other tests may add."""


async def test_changes_are_pushed_at_once(http: httpx.AsyncClient, redis_url: str) -> None:
    """A student hears of who comes and goes within half a second, and is registered as long as it listens."""
    async with stream(http, "/v1/pools/pushed/students/s", want="2", address="here:1") as assignments:
        await until(assignments)
        assert await students(redis_url, "pushed") == ["s"]
        async with member(redis_url, "pushed", "a"):
            await until(assignments, "a:1")
            begin = time.monotonic()
            async with member(redis_url, "pushed", "b"):
                joined_s = await until(assignments, "a:1", "b:1") - begin
            begin = time.monotonic()
            left_s = await until(assignments, "a:1") - begin
        await until(assignments)
    print(f"pushed: joined after {joined_s:.3f} s, left after {left_s:.3f} s")  # noqa: T201 - what was measured
    assert max(joined_s, left_s) < PUSHED_WITHIN_S + SLACK_S
    assert await until_gone(redis_url, "pushed") > 0


async def test_a_student_that_says_nothing_is_let_go(http: httpx.AsyncClient, redis_url: str) -> None:
    """An open connection is not enough: a stopped student keeps no teachers. Its stream ends in order."""
    begin = time.monotonic()
    async with stream(http, "/v1/pools/silent/students/s") as assignments, asyncio.timeout(PATIENCE_S):
        assert len([line async for line in assignments]) >= SILENT_AFTER_S - 1
    assert SILENT_AFTER_S - 0.5 < time.monotonic() - begin < SILENT_AFTER_S + SLACK_S
    assert await students(redis_url, "silent") == []


@pytest.mark.slow
async def test_a_student_that_is_heard_of_stays(http: httpx.AsyncClient, redis_url: str) -> None:
    """Words put off the end; with the connection everything is over at once."""
    async with stream(http, "/v1/pools/heard/students/s") as assignments:
        begin = time.monotonic()
        async for _ in assignments:
            assert (await http.put("/v1/pools/heard/students/s/words", content=b"{}")).status_code == 204
            if time.monotonic() - begin > SILENT_AFTER_S + 1:
                break
        assert await students(redis_url, "heard") == ["s"]
        closed_at = time.monotonic()
    assert await until_gone(redis_url, "heard") - closed_at < PUSHED_WITHIN_S + SLACK_S


async def test_a_reader_that_takes_nothing_is_let_go(endpoint: Endpoint, redis_url: str) -> None:
    """A connection that is open and never read costs the pool a student for a few seconds only."""
    _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port, limit=1)
    writer.write(b"GET /v1/pools/stuck/students/s HTTP/1.1\r\nHost: h\r\n\r\n")
    begin = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while await students(redis_url, "stuck") != ["s"]:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
    assert await until_gone(redis_url, "stuck") - begin < SILENT_AFTER_S + 1 + SLACK_S
    writer.close()


async def test_a_later_stream_of_the_same_student_takes_over(http: httpx.AsyncClient, redis_url: str) -> None:
    """A student that comes back before the endpoint noticed that it was gone is one student."""
    path = "/v1/pools/twice/students/s"
    async with stream(http, path) as earlier:
        await until(earlier)
        async with stream(http, path) as later:
            await until(later)
            async with asyncio.timeout(PATIENCE_S):
                [_ async for _ in earlier]
            assert await students(redis_url, "twice") == ["s"]
            assert (await http.put(f"{path}/words", content=b"{}")).status_code == 204
            await until(later)


@pytest.mark.slow
async def test_many_students_cost_one_watch(http: httpx.AsyncClient, redis_url: str) -> None:
    """However many follow a pool, Redis has one waiting connection for each role, and none after the last."""
    async with member(redis_url, "many", "a"), contextlib.AsyncExitStack() as stack:
        await until_waiting(redis_url, 0)  # streams that another test has just closed
        opened = [
            await stack.enter_async_context(stream(http, f"/v1/pools/many/students/s{number}")) for number in range(12)
        ]
        for assignments in opened:
            await until(assignments, "a:1")
        assert sorted(await students(redis_url, "many")) == sorted(f"s{number}" for number in range(12))
        assert await waiting(redis_url) == 2
    await until_gone(redis_url, "many")
    await until_waiting(redis_url, 0)


async def until_waiting(url: str, count: int) -> None:
    """Return when as many of Redis' clients wait for news."""
    async with asyncio.timeout(PATIENCE_S):
        while await waiting(url) != count:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)


async def waiting(url: str) -> int:
    """How many of Redis' clients wait for news; the most of a few looks, for each wait ends now and then."""
    async with connect(url) as client:
        looks = []
        for _ in range(10):
            looks.append(sum("b" in one["flags"] for one in await client.client_list()))
            await asyncio.sleep(0.01)
    return max(looks)


async def test_sigterm_ends_streams_in_order(redis_url: str) -> None:
    """Students read an end, no broken connection, are in no list any more, and the exit status is 0."""
    settings = RuntimeSettings(redis_url=redis_url, namespace=NAMESPACE, lease_ttl_s=60.0)
    with running_discovery(settings) as endpoint:
        async with asking(endpoint.url) as http, stream(http, "/v1/pools/ends/students/s") as assignments:
            await until(assignments)
            endpoint.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                [_ async for _ in assignments]
        assert await asyncio.to_thread(endpoint.process.wait, PATIENCE_S) == 0
    assert await students(redis_url, "ends") == []


async def test_pools_beyond_the_limit_are_refused(redis_url: str) -> None:
    """Watches of many pools leave connections to Redis for leases; whoever comes too late reads why and tries again."""
    async with connect(redis_url) as client:
        hub = Hub(client, NAMESPACE, ttl_s=1.0, most_pools=1)
        transport = httpx.ASGITransport(build_app(hub, client, NAMESPACE, token=""))
        async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as http:
            one, other = Member(id="s", address="h:1"), Member(id="t", address="h:2")
            async with hub.connect("first", one), hub.connect("first", other):
                refused = await http.get("/v1/pools/second/students/s")
            assert refused.status_code == 503
            assert "'second'" in refused.json()["error"]
            async with hub.connect("second", one):
                pass
    assert 2 * POOL_LIMIT <= REDIS_LIMIT - 100
