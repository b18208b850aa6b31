"""A real `edl discovery` with a real Redis, as any HTTP client sees it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

import httpx
import msgspec
import pytest
from support.registry.discovery_client import NAMESPACE, asking, member, stream, students, until
from support.registry.discovery_process import Endpoint, running_discovery
from support.teachers.process import PATIENCE_S

from edl_runtime.discovery.app import WORDS_LIMIT
from edl_runtime.errors import EX_CONFIG
from edl_runtime.registry.pools import view_pools
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.client import connect
from edl_runtime.store.server import RedisServer


async def test_lists_are_those_of_edl_pools(http: httpx.AsyncClient, redis_url: str) -> None:
    """All pools and one, as JSON; a pool without members is not found, and which there are is said."""
    async with member(redis_url, "listed", "a"), connect(redis_url) as client:
        wanted = msgspec.json.decode(msgspec.json.encode(await view_pools(client, NAMESPACE)))
        assert (await http.get("/v1/pools")).json() == wanted
        assert (await http.get("/v1/pools/listed")).json() in wanted
        absent = await http.get("/v1/pools/absent")
    assert absent.status_code == 404
    assert "no pool 'absent'" in absent.json()["error"]


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


async def test_who_only_asks_whether_there_is_a_stream_is_no_student(http: httpx.AsyncClient, redis_url: str) -> None:
    """HEAD, which programs that watch others like to ask by, registers nobody and is answered at once."""
    assert (await http.head("/v1/pools/head/students/s")).status_code == 405
    assert await students(redis_url, "head") == []


async def test_words_that_can_not_be_heard_are_refused(http: httpx.AsyncClient) -> None:
    """Words of nobody, none at all and too many."""
    path = "/v1/pools/words/students/s/words"
    assert (await http.put(path, content=b"{}")).status_code == 404
    assert (await http.put(path, content=b'{"quarantined": 1}')).status_code == 400
    assert (await http.put(path, content=b'{"quarantined": {"t:1": "\xff"}}')).status_code == 400
    assert (await http.put(path, content=b" " * (WORDS_LIMIT + 1))).status_code == 413


@pytest.mark.parametrize(
    ("asked", "rest"),
    [
        (b"", b"GET /v1/pools HT"),
        (b"GET /v1/health/live HTTP/1.1\r\nHost: e\r\n\r\n", b"GET /v1/pools HT"),
        (b"GET /v1/health/live HTTP/1.1\r\nHost: e\r\nContent-Length: 9\r\n\r\n", b"x"),
    ],
)
async def test_who_asks_nothing_is_disconnected(endpoint: Endpoint, asked: bytes, rest: bytes) -> None:
    """A connection that is only held is one that others could need, whatever it has been answered before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    if asked:
        writer.write(asked)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.write(rest)
    with contextlib.suppress(ConnectionResetError):
        await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()


async def test_a_token_is_asked_for(redis_url: str, namespace: str) -> None:
    """Without it or with a wrong one nothing but health is told."""
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, discovery_token="t0ken")
    with running_discovery(settings, "--host", "0.0.0.0") as endpoint:
        async with asking(f"http://127.0.0.1:{endpoint.port}") as http:
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
        with running_discovery(RuntimeSettings(redis_url=server.url, namespace=NAMESPACE)) as endpoint:
            async with asking(endpoint.url) as http:
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
