"""A discovery endpoint with a real Redis, as any HTTP client and a student see it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs
from support.network.certificates import Authority
from support.registry.discovery_client import (
    STUDENT,
    http_client,
    read_to_end,
    registered_students,
    serving,
    stream,
    wait_for_students,
    wait_for_teachers,
)
from support.registry.followers import (
    POOL,
    discovery_settings,
    failure_of,
    registered,
    student,
    wait_for_log,
    wait_for_quarantine,
)
from support.teachers.process import PATIENCE_S

from edl_runtime.discovery import app, server
from edl_runtime.discovery import assignments as assignments_module
from edl_runtime.discovery.app import STATUS_LIMIT, build_app
from edl_runtime.discovery.assignments import StudentRegistry
from edl_runtime.discovery.errors import DiscoveryRefusedError, DiscoveryUnavailableError
from edl_runtime.errors import SpecError
from edl_runtime.protocol import asgi_server, listener
from edl_runtime.registry.members import Member
from edl_runtime.registry.pools import list_pools
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import RegistryError
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

TOKEN = "t0ken"
ASK_LIVE = b"GET /v1/health/live HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def settings(settings: RuntimeSettings) -> RuntimeSettings:
    """Leases that last: here nobody is killed, and whoever leaves says so."""
    return msgspec.structs.replace(settings, lease_ttl_s=60.0)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No student that says nothing is taken for one that is gone, however slow the test is."""
    monkeypatch.setattr(assignments_module, "SILENT_AFTER_S", 3600.0)


@pytest.fixture
async def http(settings: RuntimeSettings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an endpoint without a token."""
    async with serving(settings) as url, http_client(url) as client:
        yield client


async def test_lists_are_those_of_edl_pools(http: httpx.AsyncClient, settings: RuntimeSettings) -> None:
    """All pools and one, as JSON; a pool without members is not found, and which there are is said."""
    async with registered(settings, "a:1"), connect(settings.redis_url) as client:
        wanted = msgspec.json.decode(msgspec.json.encode(await list_pools(client, settings.namespace)))
        assert [pool["name"] for pool in wanted] == [POOL]
        assert (await http.get("/v1/pools")).json() == wanted
        assert (await http.get(f"/v1/pools/{POOL}")).json() in wanted
        absent = await http.get("/v1/pools/absent")
    assert absent.status_code == 404
    assert "no pool 'absent'" in absent.json()["error"]


async def test_invalid_requests_are_refused(http: httpx.AsyncClient, settings: RuntimeSettings) -> None:
    """With a reason, in JSON; nobody is registered, by HEAD neither, which programs that watch others ask by."""
    for path, status, said in (
        ("/v1/pools/Bad_Name", 400, "a-z"),
        (f"{STUDENT}?want=0", 400, "want"),
        (f"{STUDENT}?want={'9' * 30}", 400, "want"),
        (f"{STUDENT}?address=two%20words", 400, "address"),
        (f"/v1/pools/{POOL}/students/{'s' * 201}", 400, "student"),
        ("/v1/elsewhere", 404, "Not Found"),
    ):
        response = await http.get(path)
        assert response.status_code == status
        assert said in response.json()["error"]
    assert (await http.head(STUDENT)).status_code == 405
    words = f"{STUDENT}/status"
    assert (await http.put(words, content=b"{}")).status_code == 404
    assert (await http.put(words, content=b'{"quarantined": 1}')).status_code == 400
    assert (await http.put(words, content=b'{"quarantined": {"t:1": "\xff"}}')).status_code == 400
    assert (await http.put(words, content=b'{"x":' + b"[" * 50_000)).status_code == 400
    assert (await http.put(words, content=b" " * (STATUS_LIMIT + 1))).status_code == 413
    assert await registered_students(settings) == []


async def test_a_token_is_required(settings: RuntimeSettings) -> None:
    """Without it or with a wrong one nothing but health is told; a student says so at once, and shows none."""
    secured = msgspec.structs.replace(settings, discovery_token=TOKEN)
    async with serving(secured) as url, http_client(url) as http, registered(settings, "a:1"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            for path in ("/v1/pools", f"/v1/pools/{POOL}", STUDENT, "/elsewhere"):
                refused = await http.get(path, headers=headers)
                assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
                assert "EDL_DISCOVERY_TOKEN" in refused.json()["error"]
            assert (await http.get("/v1/health/live", headers=headers)).json() == {"live": True}
            assert (await http.get("/v1/health/ready", headers=headers)).json() == {"ready": True}
        with capture_logs() as logs:
            for token in ("", "wr0ng"):
                error = await failure_of(
                    msgspec.structs.replace(discovery_settings(url, settings), discovery_token=token)
                )
                assert isinstance(error, DiscoveryRefusedError)
                assert error.status == 401
                assert "EDL_DISCOVERY_TOKEN" in str(error)
                assert not any(secret in f"{error}{logs}" for secret in ("wr0ng", TOKEN))
        async with student(discovery_settings(url, secured)) as one:
            await one.wait_for(lambda teachers: teachers == ("a:1",))


async def test_https_needs_a_trusted_certificate(
    settings: RuntimeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student follows as ever; one that does not know the certificate, or speaks no TLS, is told nothing."""
    authority = Authority(tmp_path / "ours")
    shown = authority.sign("127.0.0.1")
    secured = msgspec.structs.replace(settings, tls_cert=str(shown.cert), tls_key=str(shown.key))
    async with serving(secured) as url, registered(settings, "a:1"):
        assert url.startswith("https://")
        for other, said in ((url, "certificate"), (url.replace("https", "http"), "")):
            error = await failure_of(discovery_settings(other, settings))
            assert isinstance(error, DiscoveryUnavailableError)
            assert said in str(error)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        async with student(discovery_settings(url, settings)) as one:
            await one.wait_for(lambda teachers: teachers == ("a:1",))
            one.quarantined["a:1"] = "garbage"
            await wait_for_quarantine(settings, "garbage (by 1 student)")


async def test_wrong_settings_of_an_endpoint_are_errors(settings: RuntimeSettings) -> None:
    """What to set is said, and which port is taken."""

    async def serve(host: str, settings: RuntimeSettings, port: int = 0) -> None:
        await server.serve(host, port, settings, pytest.fail)

    with pytest.raises(SpecError, match="EDL_DISCOVERY_TOKEN"):
        await serve("0.0.0.0", settings)
    with pytest.raises(SpecError, match="EDL_REDIS_URL"):
        await serve("127.0.0.1", RuntimeSettings())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RegistryError, match=re.escape(f"can't listen on 127.0.0.1 port {port}")):
            await serve("127.0.0.1", settings, port)


async def test_without_redis_it_is_unavailable_and_comes_back(own_redis: RedisServer) -> None:
    """503 with the reason while Redis is away, and the lists as soon as it is there; it lives all the time."""
    own_redis.kill()
    settings = RuntimeSettings(redis_url=own_redis.url, namespace="n")
    async with serving(settings) as url, http_client(url) as http:
        for path in ("/v1/pools", f"/v1/pools/{POOL}", STUDENT):
            refused = await http.get(path)
            assert refused.status_code == 503
            assert f"Redis at 127.0.0.1:{own_redis.port}" in refused.json()["error"]
        assert (await http.get("/v1/health/ready")).status_code == 503
        assert (await http.get("/v1/health/live")).status_code == 200
        await asyncio.to_thread(own_redis.start)
        assert (await http.get("/v1/pools")).json() == []
        async with stream(http) as assignments:
            await wait_for_teachers(assignments)


async def test_changes_are_pushed(
    http: httpx.AsyncClient, settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student hears of who comes and goes without waiting for the next repetition, and is gone with its stream."""
    monkeypatch.setattr(assignments_module, "REPORT_EVERY_S", 3600.0)
    async with stream(http, want="2", address="here:1") as assignments:
        await wait_for_teachers(assignments)
        assert await registered_students(settings) == ["s"]
        async with registered(settings, "a:1"):
            await wait_for_teachers(assignments, "a:1")
            async with registered(settings, "b:1"):
                await wait_for_teachers(assignments, "a:1", "b:1")
            await wait_for_teachers(assignments, "a:1")
        await wait_for_teachers(assignments)
    await wait_for_students(settings)


async def test_a_silent_student_is_removed(
    http: httpx.AsyncClient, settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped student, or one that never reads its stream, keeps no teachers. The stream ends in order."""
    monkeypatch.setattr(assignments_module, "SILENT_AFTER_S", 0.5)
    monkeypatch.setattr(assignments_module, "REPORT_EVERY_S", 0.01)
    async with stream(http) as assignments:
        await read_to_end(assignments)
    assert await registered_students(settings) == []
    with capture_logs() as logs:
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port, limit=1)
        writer.write(f"GET {STUDENT} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        await wait_for_log(logs, "student.disconnected")
    assert await registered_students(settings) == []
    assert "member.registered" in [entry["event"] for entry in logs]
    writer.close()


async def test_a_later_stream_of_the_same_student_takes_over(
    http: httpx.AsyncClient, settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student that comes back before the endpoint noticed that it was gone is one student."""
    monkeypatch.setattr(assignments_module, "REPORT_EVERY_S", 0.05)
    async with stream(http) as earlier:
        await wait_for_teachers(earlier)
        async with stream(http) as later:
            await wait_for_teachers(later)
            await read_to_end(earlier)
            assert await registered_students(settings) == ["s"]
            assert (await http.put(f"{STUDENT}/status", content=b"{}")).status_code == 204
            await wait_for_teachers(later)


async def test_many_students_cost_one_watch(http: httpx.AsyncClient, settings: RuntimeSettings) -> None:
    """However many follow a pool, Redis has one waiting connection for each role, and none after the last."""
    names = sorted(f"s{number}" for number in range(12))
    async with registered(settings, "a:1"), contextlib.AsyncExitStack() as stack:
        await until_waiting(settings, 0)  # streams that another test has just closed
        opened = [await stack.enter_async_context(stream(http, f"{STUDENT[:-1]}{name}")) for name in names]
        for assignments in opened:
            await wait_for_teachers(assignments, "a:1")
        assert sorted(await registered_students(settings)) == names
        await until_waiting(settings, 2)
    await wait_for_students(settings)
    await until_waiting(settings, 0)


async def until_waiting(settings: RuntimeSettings, count: int) -> None:
    """Return when as many of Redis' clients wait for news."""
    async with asyncio.timeout(PATIENCE_S):
        while await waiting(settings) != count:  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.05)


async def waiting(settings: RuntimeSettings) -> int:
    """How many of Redis' clients wait for news; the most of a few looks, for each wait ends now and then."""
    async with connect(settings.redis_url) as client:
        looks = []
        for _ in range(10):
            looks.append(sum("b" in one["flags"] for one in await client.client_list()))
            await asyncio.sleep(0.01)
    return max(looks)


async def test_pools_beyond_the_limit_are_refused(redis_url: str, namespace: str) -> None:
    """Watches of many pools leave connections to Redis for leases; whoever comes too late reads why and tries again."""
    async with connect(redis_url) as client:
        hub = StudentRegistry(client, namespace, ttl_s=1.0, most_pools=1)
        transport = httpx.ASGITransport(build_app(hub, client, namespace, token=""))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            one, other = Member(id="s", address="h:1"), Member(id="t", address="h:2")
            async with hub.connect("first", one), hub.connect("first", other):
                refused = await http.get("/v1/pools/second/students/s")
            assert refused.status_code == 503
            assert "'second'" in refused.json()["error"]
            async with hub.connect("second", one):
                pass
    assert 2 * server.POOL_LIMIT <= server.REDIS_LIMIT - 100


@pytest.mark.parametrize(
    ("asked", "rest"),
    [
        (b"", b"GET /v1/pools HT"),
        (ASK_LIVE + b"\r\n", b"GET /v1/pools HT"),
        (ASK_LIVE + b"Content-Length: 9\r\n\r\n", b"x"),
    ],
    ids=["nothing", "one request", "half a body"],
)
async def test_a_connection_without_a_request_is_closed(
    settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch, asked: bytes, rest: bytes
) -> None:
    """A connection that is only held is one that others could need, whatever it has been answered before."""
    monkeypatch.setattr(asgi_server, "IDLE_S", 0.2)
    async with serving(settings) as url, knocking(url, asked + rest) as (reader, _):
        await ends(reader)


async def test_a_body_that_does_not_arrive_times_out(
    settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that was announced and is not sent holds nothing up."""
    monkeypatch.setattr(app, "STATUS_WITHIN_S", 0.1)
    words = f"PUT {STUDENT}/status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{".encode()
    async with serving(settings) as url, knocking(url, words) as (reader, _):
        assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).startswith(b"HTTP/1.1 408 ")


@contextlib.asynccontextmanager
async def knocking(url: str, asked: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect, send that, and wait for the answer if it is a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    writer.write(asked)
    if asked.startswith(ASK_LIVE):
        with contextlib.suppress(ConnectionResetError):
            await reader.read(1)
    yield reader, writer
    writer.close()


async def ends(reader: asyncio.StreamReader) -> None:
    """Wait until the endpoint disconnects."""
    with contextlib.suppress(ConnectionResetError):
        await asyncio.wait_for(reader.read(), PATIENCE_S)


async def test_strangers_can_not_lock_out_clients_with_the_token(
    settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest connection without it makes room; where there is none, the newest goes, and no stream ends."""
    monkeypatch.setattr(server, "CONNECTION_LIMIT", 3)
    monkeypatch.setattr(asgi_server, "IDLE_S", 3600.0)
    settings = msgspec.structs.replace(settings, discovery_token=TOKEN)
    live = ASK_LIVE + b"\r\n"
    async with serving(settings) as url, http_client(url, TOKEN) as http, contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(stream(http))]
        async with knocking(url, live) as (oldest, _), knocking(url, live) as (newer, asks):
            assert (await http.get("/v1/pools")).status_code == 200
            await ends(oldest)
            await newer.readuntil(b"true}")
            asks.write(live)
            await newer.readuntil(b"true}")
        streams += [await stack.enter_async_context(stream(http, f"{STUDENT}{number}")) for number in range(2)]
        async with knocking(url, live) as (newest, _):
            await ends(newest)
        for assignments in streams:
            await wait_for_teachers(assignments)


async def test_silent_clients_count_before_they_begin_tls(
    settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beyond the most connections the oldest goes; and each goes that has not begun TLS in time."""
    shown = Authority(tmp_path / "ours").sign("127.0.0.1")
    monkeypatch.setattr(server, "CONNECTION_LIMIT", 3)
    monkeypatch.setattr(listener, "HANDSHAKE_S", 3600.0)
    settings = msgspec.structs.replace(settings, tls_cert=str(shown.cert), tls_key=str(shown.key))
    async with serving(settings) as url, contextlib.AsyncExitStack() as stack:

        async def silent() -> asyncio.StreamReader:
            return (await stack.enter_async_context(knocking(url, b"")))[0]

        clients = [await silent() for _ in range(5)]
        for oldest in clients[:2]:
            await ends(oldest)
        monkeypatch.setattr(listener, "HANDSHAKE_S", 0.05)
        await ends(await silent())
