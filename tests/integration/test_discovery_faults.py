"""`edl discovery` as a process that ends, is killed, or loses its Redis, while students follow it."""

from __future__ import annotations

import asyncio
import signal
import time

import msgspec
import pytest
from structlog.testing import capture_logs
from support.network.ports import free_ports
from support.registry.discovery_client import (
    http_client,
    read_to_end,
    registered_students,
    serving,
    stream,
    wait_for_teachers,
)
from support.registry.discovery_process import running_discovery
from support.registry.followers import POOL, discovery_settings, registered, student, wait_for_log
from support.students.readers import Batches, reader_of, slow_teacher

from edl_runtime.discovery import client
from edl_runtime.distill import Discovered
from edl_runtime.registry import directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_server import RedisServer

HANGS_AFTER_S = 100.0


async def test_sigterm_ends_streams_in_order(settings: RuntimeSettings) -> None:
    """Students read an end, no broken connection, are in no list any more, and the exit status is 0."""
    settings = msgspec.structs.replace(settings, lease_ttl_s=60.0, discovery_token="t0ken")
    with running_discovery(settings, "--host", "0.0.0.0") as endpoint:
        url = f"http://127.0.0.1:{endpoint.port}"
        async with http_client(url, "t0ken") as http, stream(http) as assignments:
            await wait_for_teachers(assignments)
            endpoint.process.send_signal(signal.SIGTERM)
            await read_to_end(assignments)
        _, said = await asyncio.to_thread(endpoint.process.communicate, timeout=HANGS_AFTER_S)
    assert endpoint.process.returncode == 0
    assert "discovery.stopped" in said
    assert "t0ken" not in said
    assert await registered_students(settings) == []


@pytest.mark.slow
def test_a_killed_endpoint_stops_no_reader(settings: RuntimeSettings) -> None:
    """The last teachers stay in use, nothing is lost, repeated or reordered; back, it tells of a new teacher."""
    batches = Batches(10**6, seconds=0.002)
    lasting = msgspec.structs.replace(settings, lease_ttl_s=60.0)  # its lease is not what is looked at
    seen = []
    with (
        slow_teacher(lasting),
        running_discovery(settings, "--port", str(free_ports(1)[0])) as endpoint,
        reader_of(batches, Discovered(POOL), discovery_settings(endpoint.url, settings)) as reader,
        capture_logs() as logs,
    ):
        epoch = iter(reader)
        seen.append(next(epoch))
        endpoint.kill()
        while asyncio.run(registered_students(settings)):  # longer than the student's own lease
            seen.append(next(epoch))
        assert reader.stats().teachers == 1
        with running_discovery(settings, "--port", str(endpoint.port)), slow_teacher(lasting):
            begin = time.monotonic()
            while reader.stats().teachers < 2:
                seen.append(next(epoch))
                assert time.monotonic() - begin < HANGS_AFTER_S
        batches.count = len(seen)
        batches.check(seen)
    assert [entry["event"] for entry in logs if entry["event"].startswith("discovery")][:2] == [
        "discovery.unavailable",
        "discovery.recovered",
    ]


async def test_an_endpoint_that_is_slow_for_a_moment_ends_no_student(
    settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student that starts while an answer takes longer than its limit asks again, and is told its teachers."""
    settings = msgspec.structs.replace(settings, lease_ttl_s=60.0)
    with running_discovery(settings) as endpoint, capture_logs() as logs:
        endpoint.process.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as impatient:
            impatient.setattr(client, "SILENT_AFTER_S", 0.2)
            async with registered(settings, "a:1"), student(discovery_settings(endpoint.url, settings)) as one:
                await wait_for_log(logs, "registry.unavailable")
                impatient.undo()  # the next answer is waited for as long as ever
                endpoint.process.send_signal(signal.SIGCONT)
                await one.wait_for(lambda teachers: teachers == ("a:1",))


async def test_an_endpoint_whose_redis_is_not_there_yet_is_waited_for(own_redis: RedisServer) -> None:
    """A student that starts meanwhile is answered 503, asks again, says why it has no teacher, and then has one."""
    settings = RuntimeSettings(redis_url=own_redis.url, namespace="n", lease_ttl_s=60.0)
    own_redis.kill()
    with running_discovery(settings) as endpoint, capture_logs() as logs:
        async with student(discovery_settings(endpoint.url, settings)) as one:
            await wait_for_log(logs, "registry.unavailable")
            assert one.outages
            assert "it answered 503" in one.outages[0]
            await asyncio.to_thread(own_redis.start)
            async with registered(settings, "a:1"):
                await one.wait_for(lambda teachers: teachers == ("a:1",))


async def test_redis_may_go_behind_it(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The student keeps its teachers and its stream while Redis is away, and hears of new ones when it is back."""
    monkeypatch.setattr(directory, "SETTLE_S", 3600.0)  # as long as its teacher takes to come back
    settings = RuntimeSettings(redis_url=own_redis.url, namespace="n", lease_ttl_s=0.5)
    with capture_logs() as logs:
        async with (
            serving(settings) as url,
            registered(settings, "a:1"),
            student(discovery_settings(url, settings)) as one,
        ):
            await one.wait_for(lambda teachers: teachers == ("a:1",))
            own_redis.kill()
            await wait_for_log(logs, "registry.unavailable")
            await asyncio.to_thread(own_redis.start)
            async with registered(settings, "b:1"):
                await one.wait_for(lambda teachers: teachers == ("a:1", "b:1"))
            assert all(teachers for _, teachers in one.updates)
    assert not any(entry["event"] == "discovery.unavailable" for entry in logs)
