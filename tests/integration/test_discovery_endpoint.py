"""A real `edl discovery` with a real Redis, as any HTTP client sees it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from discovery_process import Endpoint, running_discovery
from teacher_process import PATIENCE_S

from edl_runtime.discovery.app import WORDS_LIMIT
from edl_runtime.discovery.messages import SILENT_AFTER_S, Assignment
from edl_runtime.errors import EX_CONFIG
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.registry.pools import view_pools
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.client import connect
from edl_runtime.store.keys import Role, Service
from edl_runtime.store.server import RedisServer

PUSHED_WITHIN_S = 0.5
SLACK_S = 1.0
"""What a machine that is busy with other tests may add."""


@pytest.fixture(scope="module")
def endpoint(redis_server: RedisServer) -> Iterator[Endpoint]:
    """An endpoint that these tests share; each uses a pool of its own."""
    settings = RuntimeSettings(redis_url=redis_server.url, namespace="endpoint", lease_ttl_s=1.0)
    with running_discovery(settings) as endpoint:
        yield endpoint


@pytest.fixture
async def http(endpoint: Endpoint) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=endpoint.url, trust_env=False, timeout=PATIENCE_S) as client:
        yield client


@contextlib.asynccontextmanager
async def member(url: str, pool: str, name: str, role: Role = "teachers") -> AsyncIterator[None]:
    async with (
        connect(url) as client,
        hold_lease(client, Service("endpoint", pool, role), Member(id=name, address=f"{name}:1")),
    ):
        yield


@contextlib.asynccontextmanager
async def stream(http: httpx.AsyncClient, path: str, **params: str) -> AsyncIterator[AsyncGenerator[Assignment, None]]:
    """Open a student's stream and give its lines."""
    async with http.stream("GET", path, params=params) as response:
        assert response.status_code == 200

        async def lines() -> AsyncGenerator[Assignment, None]:
            async for line in response.aiter_lines():
                yield msgspec.json.decode(line, type=Assignment)

        async with contextlib.aclosing(lines()) as assignments:
            yield assignments


async def until(assignments: AsyncGenerator[Assignment, None], *wanted: str) -> float:
    """Wait for that assignment; return when it came."""
    async with asyncio.timeout(PATIENCE_S):
        async for assignment in assignments:
            if assignment.teachers == wanted:
                return time.monotonic()
    pytest.fail("the stream ended")


async def students(url: str, pool: str) -> list[str]:
    async with connect(url) as client:
        return [member.id for member in await Directory(client, "endpoint").members(pool, "students")]


async def until_gone(url: str, pool: str) -> float:
    async with asyncio.timeout(PATIENCE_S):
        while await students(url, pool):  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.02)
    return time.monotonic()


async def test_lists_are_those_of_edl_pools(http: httpx.AsyncClient, redis_url: str) -> None:
    """All pools and one, as JSON; a pool without members is not found, and which there are is said."""
    async with member(redis_url, "listed", "a"), connect(redis_url) as client:
        wanted = msgspec.json.decode(msgspec.json.encode(await view_pools(client, "endpoint")))
        assert (await http.get("/v1/pools")).json() == wanted
        assert (await http.get("/v1/pools/listed")).json() in wanted
        absent = await http.get("/v1/pools/absent")
    assert absent.status_code == 404
    assert "no pool 'absent'" in absent.json()["error"]


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
        before = await waiting(redis_url)
        opened = [
            await stack.enter_async_context(stream(http, f"/v1/pools/many/students/s{number}")) for number in range(12)
        ]
        for assignments in opened:
            await until(assignments, "a:1")
        assert sorted(await students(redis_url, "many")) == sorted(f"s{number}" for number in range(12))
        assert await waiting(redis_url) - before == 2
    await until_gone(redis_url, "many")
    async with asyncio.timeout(PATIENCE_S):
        while await waiting(redis_url) != before:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)


async def waiting(url: str) -> int:
    """How many of Redis' clients wait for news; the most of a few looks, for each wait ends now and then."""
    async with connect(url) as client:
        looks = []
        for _ in range(10):
            looks.append(sum("b" in one["flags"] for one in await client.client_list()))
            await asyncio.sleep(0.01)
    return max(looks)


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/v1/pools/Bad_Name", 400, "a-z"),
        ("/v1/pools/p/students/s?want=0", 400, "want"),
        ("/v1/pools/p/students/s?want=" + "9" * 30, 400, "want"),
        ("/v1/pools/p/students/s?address=two%20words", 400, "address"),
        ("/v1/pools/p/students/" + "s" * 201, 400, "student"),
        ("/v1/elsewhere", 404, "Not Found"),
    ],
)
async def test_what_can_not_be_asked_is_refused(
    http: httpx.AsyncClient, redis_url: str, path: str, status: int, said: str
) -> None:
    """With a reason, in JSON; nobody is registered."""
    response = await http.get(path)
    assert response.status_code == status
    assert said in response.json()["error"]
    assert await students(redis_url, "p") == []


async def test_words_that_can_not_be_heard_are_refused(http: httpx.AsyncClient) -> None:
    """Words of nobody, none at all and too many."""
    path = "/v1/pools/words/students/s/words"
    assert (await http.put(path, content=b"{}")).status_code == 404
    assert (await http.put(path, content=b'{"quarantined": 1}')).status_code == 400
    assert (await http.put(path, content=b" " * (WORDS_LIMIT + 1))).status_code == 413


async def test_who_asks_nothing_is_disconnected(endpoint: Endpoint) -> None:
    """A connection that is only held is one that others could need."""
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(b"GET /v1/pools HT")
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()


async def test_a_token_is_asked_for(redis_url: str, namespace: str) -> None:
    """Without it or with a wrong one nothing but health is told."""
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, discovery_token="t0ken")
    with running_discovery(settings, "--host", "0.0.0.0") as endpoint:
        base = f"http://127.0.0.1:{endpoint.port}"
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=PATIENCE_S) as http:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "t0ken"}):
                for path in ("/v1/pools", "/v1/pools/p", "/v1/pools/p/students/s", "/elsewhere"):
                    refused = await http.get(path, headers=headers)
                    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
                    assert "EDL_DISCOVERY_TOKEN" in refused.json()["error"]
                assert (await http.get("/v1/health/live", headers=headers)).json() == {"live": True}
                assert (await http.get("/v1/health/ready", headers=headers)).json() == {"ready": True}
            assert (await http.get("/v1/pools", headers={"Authorization": "Bearer t0ken"})).json() == []
        endpoint.process.terminate()
        _, said = endpoint.process.communicate()
    assert "t0ken" not in said


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (["--host", "0.0.0.0"], {}, "EDL_DISCOVERY_TOKEN"),
        ([], {"EDL_REDIS_URL": ""}, "EDL_REDIS_URL"),
        ([], {"EDL_DISCOVERY_TOKEN": "two words"}, "EDL_DISCOVERY_TOKEN"),
    ],
)
def test_an_endpoint_that_can_never_work_says_so(
    redis_url: str, flags: list[str], env: dict[str, str], said: str
) -> None:
    """It ends as what a restart can't mend, with what to set."""
    settings = RuntimeSettings(redis_url=redis_url)
    with (
        pytest.raises(AssertionError, match=f"(?s)ended with {EX_CONFIG}.*{said}"),
        running_discovery(settings, *flags, env=env),
    ):
        pytest.fail("it is ready")


def test_a_port_that_is_taken_is_an_error_without_a_traceback(endpoint: Endpoint, redis_url: str) -> None:
    """Host and port are said; the exit status is one of those that a restart may mend."""
    said = f"ended with 1: edl: can't listen on 127.0.0.1 port {endpoint.port}"
    with (
        pytest.raises(AssertionError, match=re.escape(said)),
        running_discovery(RuntimeSettings(redis_url=redis_url), "--port", str(endpoint.port)),
    ):
        pytest.fail("it is ready")


@pytest.mark.slow
async def test_without_redis_it_is_unavailable_and_comes_back(tmp_path: Path) -> None:
    """503 with the reason while Redis is away, and the lists as soon as it is there; it lives all the time."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    server.kill()
    try:
        with running_discovery(RuntimeSettings(redis_url=server.url, namespace="endpoint")) as endpoint:
            async with httpx.AsyncClient(base_url=endpoint.url, trust_env=False, timeout=PATIENCE_S) as http:
                for path in ("/v1/pools", "/v1/pools/p", "/v1/pools/p/students/s"):
                    refused = await http.get(path)
                    assert refused.status_code == 503
                    assert f"Redis at 127.0.0.1:{server.port}" in refused.json()["error"]
                assert (await http.get("/v1/health/ready")).status_code == 503
                assert (await http.get("/v1/health/live")).status_code == 200
                await asyncio.to_thread(server.start)
                assert (await http.get("/v1/pools")).json() == []
                async with stream(http, "/v1/pools/p/students/s") as assignments:
                    await until(assignments)
    finally:
        server.stop()


async def test_sigterm_ends_streams_in_order(redis_url: str) -> None:
    """Students read an end, no broken connection, are in no list any more, and the exit status is 0."""
    settings = RuntimeSettings(redis_url=redis_url, namespace="endpoint", lease_ttl_s=60.0)
    with running_discovery(settings) as endpoint:
        async with httpx.AsyncClient(base_url=endpoint.url, trust_env=False, timeout=PATIENCE_S) as http:
            async with stream(http, "/v1/pools/ends/students/s") as assignments:
                await until(assignments)
                endpoint.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(PATIENCE_S):
                    [_ async for _ in assignments]
            assert await students(redis_url, "ends") == []
        assert await asyncio.to_thread(endpoint.process.wait, PATIENCE_S) == 0
