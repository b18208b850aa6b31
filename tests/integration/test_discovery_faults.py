"""A discovery endpoint that is not there, is not ours, is killed, or loses its Redis, while students follow it."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from support.network.tls_front import tls_front
from support.registry.discovery_process import running_discovery
from support.registry.followers import POOL, behind, registered, student, until_shown
from support.students.readers import Batches, reader_of, slow_teacher, wait_for_teachers
from support.teachers.process import running_teacher

from edl_runtime.discovery.messages import SILENT_AFTER_S
from edl_runtime.distill import Discovered
from edl_runtime.errors import DiscoveryRefusedError, DiscoveryUnavailableError, SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.server import RedisServer

SLACK_S = 1.0


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def failure_of(settings: RuntimeSettings) -> Exception:
    """What a student raises."""
    with pytest.raises(ExceptionGroup) as caught:
        async with student(settings), asyncio.timeout(10):
            await asyncio.Event().wait()
    [error] = caught.value.exceptions
    assert isinstance(error, Exception)
    return error


async def test_an_endpoint_that_is_not_there_at_the_start_is_said(closed_port: int) -> None:
    """At once, with its URL."""
    url = f"http://127.0.0.1:{closed_port}"
    error = await failure_of(RuntimeSettings(discovery_url=url, discovery_token="t0ken"))
    assert isinstance(error, DiscoveryUnavailableError)
    assert url in str(error)
    assert "EDL_DISCOVERY_URL" in str(error)
    assert "t0ken" not in str(error)


async def test_an_endpoint_without_redis_at_the_start_is_said(closed_port: int) -> None:
    """The student learns which Redis the endpoint misses."""
    settings = RuntimeSettings(redis_url=f"redis://127.0.0.1:{closed_port}/0")
    with running_discovery(settings) as endpoint:
        error = await failure_of(behind(endpoint.url, settings))
    assert isinstance(error, DiscoveryUnavailableError)
    assert f"Redis at 127.0.0.1:{closed_port}" in str(error)


@pytest.mark.parametrize("token", ["", "wr0ng"])
async def test_a_wrong_token_is_said_and_never_shown(settings: RuntimeSettings, token: str) -> None:
    """At once, not after attempts; neither the wrong nor the right one stands in a log or message."""
    with running_discovery(settings, env={"EDL_DISCOVERY_TOKEN": "t0ken"}) as endpoint, capture_logs() as logs:
        error = await failure_of(msgspec.structs.replace(behind(endpoint.url, settings), discovery_token=token))
    assert isinstance(error, DiscoveryRefusedError)
    assert error.status == 401
    assert "EDL_DISCOVERY_TOKEN" in str(error)
    assert not any(secret in f"{error}{logs}" for secret in ("wr0ng", "t0ken"))


async def test_the_right_token_opens(settings: RuntimeSettings) -> None:
    """Lists and words need it alike."""
    settings = msgspec.structs.replace(settings, discovery_token="t0ken")
    with running_discovery(settings) as endpoint:
        async with registered(settings, "a:1"), student(behind(endpoint.url, settings)) as one:
            await one.until(lambda teachers: teachers == ("a:1",))


async def test_https_is_spoken_with_whom_one_trusts(
    settings: RuntimeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a TLS front a student follows as ever; with a certificate that it does not know it tells nothing."""
    certificate = tmp_path / "front.pem"
    with running_discovery(settings) as endpoint:
        async with registered(settings, "a:1"), tls_front(endpoint.port, certificate) as url:
            error = await failure_of(behind(url, settings))
            assert isinstance(error, DiscoveryUnavailableError)
            assert "certificate" in str(error)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            async with student(behind(url, settings)) as one:
                await one.until(lambda teachers: teachers == ("a:1",))
                one.quarantined["a:1"] = "garbage"
                await until_shown(settings, "garbage (by 1 student)")


async def test_something_else_that_speaks_http_is_no_endpoint() -> None:
    """The student learns that the URL is wrong."""
    with running_teacher("support.models:arithmetic") as teacher:
        error = await failure_of(RuntimeSettings(discovery_url=f"http://{teacher.address}"))
    assert isinstance(error, DiscoveryRefusedError)
    assert error.status == 404


@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found"])
async def test_what_is_no_text_is_no_assignment_and_no_reason(status: bytes) -> None:
    """Whatever bytes come, the student raises what it always raises."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 %b\r\nContent-Length: 14\r\n\r\n{"error":"\xff"}\n' % status)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        error = await failure_of(RuntimeSettings(discovery_url=f"http://127.0.0.1:{port}"))
    assert isinstance(error, DiscoveryRefusedError)


@pytest.mark.parametrize(
    "url", ["redis://h:1", "h:1", "http://", "http://user:t0ken@h:1", "http://h:port", "http://[h"]
)
async def test_what_is_no_url_is_refused(url: str) -> None:
    """A password in it is not shown: the token has a variable of its own."""
    error = await failure_of(RuntimeSettings(discovery_url=url))
    assert isinstance(error, SpecError)
    assert "discovery_url" in str(error)
    assert "t0ken" not in str(error)


@pytest.mark.slow
def test_a_killed_endpoint_stops_no_reader(settings: RuntimeSettings) -> None:
    """The last teachers stay in use, nothing is lost, repeated or reordered; back, it tells of a new teacher."""
    batches = Batches(10**6, seconds=0.002)
    seen = []
    longest_s = 0.0
    with (
        slow_teacher(settings),
        running_discovery(settings) as endpoint,
        reader_of(batches, Discovered(POOL), behind(endpoint.url, settings)) as reader,
        capture_logs() as logs,
    ):
        wait_for_teachers(settings, 1)
        epoch = iter(reader)
        seen.append(next(epoch))
        endpoint.kill()
        last = until = time.monotonic()
        while last < until + settings.lease_ttl_s + 1:  # longer than the student's own lease
            seen.append(next(epoch))
            longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
        assert reader.stats().teachers == 1
        with running_discovery(settings, "--port", str(endpoint.port)), slow_teacher(settings):
            begin = time.monotonic()
            while reader.stats().teachers < 2:
                seen.append(next(epoch))
                assert time.monotonic() - begin < 10
        batches.count = len(seen)
        batches.check(seen)
    assert longest_s < 1 + SLACK_S
    assert [entry["event"] for entry in logs if entry["event"].startswith("discovery")][:2] == [
        "discovery.away",
        "discovery.back",
    ]


@pytest.mark.slow
async def test_an_endpoint_that_is_silent_is_left_and_found_again(settings: RuntimeSettings) -> None:
    """A stopped process keeps its connections and says nothing: the student says so and keeps its teachers."""
    with running_discovery(settings) as endpoint, capture_logs() as logs:
        async with registered(settings, "a:1"), student(behind(endpoint.url, settings)) as one:
            await one.until(lambda teachers: teachers == ("a:1",))
            endpoint.process.send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            await until_logged(logs, "discovery.away")
            assert time.monotonic() - stopped_at < SILENT_AFTER_S + SLACK_S
            endpoint.process.send_signal(signal.SIGCONT)
            await until_logged(logs, "discovery.back")
            async with registered(settings, "b:1"):
                await one.until(lambda teachers: teachers == ("a:1", "b:1"))
    assert [teachers for _, teachers in one.told if not teachers] == []


async def until_logged(logs: Sequence[Mapping[str, Any]], event: str) -> None:
    async with asyncio.timeout(20):
        while not any(entry["event"] == event for entry in logs):  # noqa: ASYNC110 - a log tells nobody
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_redis_may_go_behind_it(own_redis: RedisServer) -> None:
    """The student keeps its teachers and its stream while Redis is away, and hears of new ones when it is back."""
    settings = RuntimeSettings(redis_url=own_redis.url, namespace="n", lease_ttl_s=1.0)
    with running_discovery(settings) as endpoint, capture_logs() as logs:
        async with registered(settings, "a:1"), student(behind(endpoint.url, settings)) as one:
            await one.until(lambda teachers: teachers == ("a:1",))
            own_redis.kill()
            await asyncio.sleep(2 * settings.lease_ttl_s)
            await asyncio.to_thread(own_redis.start)
            async with registered(settings, "b:1"):
                await one.until(lambda teachers: teachers == ("a:1", "b:1"))
            assert [teachers for _, teachers in one.told if not teachers] == []
    assert [entry for entry in logs if entry["event"] == "discovery.away"] == []


@pytest.mark.slow
async def test_both_may_go_at_once(own_redis: RedisServer) -> None:
    """An endpoint that comes back with an empty Redis takes no teachers away that are about to register anew."""
    settings = RuntimeSettings(redis_url=own_redis.url, namespace="n")
    with running_discovery(settings) as endpoint, capture_logs() as logs:
        async with student(behind(endpoint.url, settings)) as one:
            async with registered(settings, "a:1"):
                await one.until(lambda teachers: teachers == ("a:1",))
                endpoint.kill()
                own_redis.kill()
            first_told = len(one.told)
            await asyncio.to_thread(own_redis.start)
            with running_discovery(settings, "--port", str(endpoint.port)):
                await until_logged(logs, "discovery.back")
                async with registered(settings, "a:1", "b:1"):
                    await one.until(lambda teachers: teachers == ("a:1", "b:1"))
                assert () not in [teachers for _, teachers in one.told[first_told:]]
                await one.until(lambda teachers: not teachers)  # in the end it is believed
