"""A student's reading while Redis is killed, emptied, silent, slow and not there.

What a killed discovery endpoint does to a student is in tests/integration/test_discovery_faults.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import redis
import structlog
from support.students.readers import (
    POOL,
    Batches,
    FaultyTeacher,
    all_answered,
    metadata_of,
    read_epoch,
    read_until,
    reader_of,
    registered,
    running_faulty_teacher,
)
from support.teachers.process import Teacher, wait_until

from edl_runtime.distill import Discovered
from edl_runtime.distill.errors import NoTeacherError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import redis_client
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.keys import ROLES, Service, service_keys
from edl_runtime.store.redis_server import RedisServer

BATCHES = Batches(50, seconds=0.005)
AWAY_S = 2.0


@pytest.fixture
def settings(own_redis: RedisServer) -> RuntimeSettings:
    return RuntimeSettings(redis_url=own_redis.url, lease_ttl_s=600.0)


kill = RedisServer.kill


def restart_empty(server: RedisServer) -> None:
    server.kill()
    server.start()


def stop(server: RedisServer) -> None:
    os.kill(server.pid, signal.SIGSTOP)


def go_on(server: RedisServer) -> None:
    os.kill(server.pid, signal.SIGCONT)


def damage(server: RedisServer) -> None:
    """Replace all that Redis has of the pool by something else."""
    with redis.Redis.from_url(server.url) as client:
        for role in ROLES:
            for key in service_keys(Service("default", POOL, role)):
                client.pipeline().delete(key).sadd(key, "?").execute()


def repair(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        kill,
        pytest.param(restart_empty, marks=pytest.mark.deep),
        pytest.param(stop, marks=pytest.mark.deep),
        pytest.param(damage, marks=pytest.mark.deep),
    ],
)
def test_reading_goes_on_and_new_teachers_are_used_when_redis_is_back(
    fault: Callable[[RedisServer], None],
    own_redis: RedisServer,
    settings: RuntimeSettings,
    good: Teacher,
    faulty: FaultyTeacher,
) -> None:
    """Teachers in use stay in use, even if their leases run out; then the student hears of others as ever."""
    if fault is stop:
        settings = msgspec.structs.replace(settings, lease_ttl_s=1.0)
    with (
        running_faulty_teacher(metadata_of(good.address)) as new,
        contextlib.ExitStack() as stack,
        registered(settings, good.address, faulty.address),
        reader_of(BATCHES, Discovered(POOL), settings) as reader,
    ):
        read_until(reader, BATCHES, all_answered(reader, 2))
        BATCHES.check(read_epoch(reader, lambda: fault(own_redis), when=lambda: reader.stats().teachers == 2))
        begin = time.monotonic()
        while time.monotonic() - begin < AWAY_S:
            BATCHES.check(list(reader))
            assert reader.stats().teachers == 2
        if fault is stop:
            go_on(own_redis)
        if fault is damage:
            repair(own_redis)
        own_redis.start()
        stack.enter_context(registered(settings, new.address))
        read_until(reader, BATCHES, lambda: reader.stats().teachers == 3)


def test_a_missing_redis_at_the_start_is_an_error(own_redis: RedisServer, settings: RuntimeSettings) -> None:
    """The first iteration raises what is wrong with which Redis."""
    kill(own_redis)
    with (
        reader_of(BATCHES, Discovered(POOL), settings) as reader,
        pytest.raises(RegistryUnavailableError, match=f"Redis at 127.0.0.1:{own_redis.port} can't be used"),
    ):
        list(reader)


def test_a_silent_redis_at_the_start_is_retried_within_the_wait_limit(
    own_redis: RedisServer, settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the first iteration raises that there is no teacher, since which Redis is silent."""
    monkeypatch.setattr(redis_client, "ANSWER_TIMEOUT_S", 0.1)
    stop(own_redis)
    hasty = msgspec.structs.replace(settings, teacher_wait_s=2.0)
    cause = f"Redis at 127.0.0.1:{own_redis.port} can't be used (no answer in time)"
    with (
        reader_of(BATCHES, Discovered(POOL), hasty) as reader,
        pytest.raises(NoTeacherError, match=re.escape(cause)) as ended,
    ):
        list(reader)
    assert ended.value.waited_s >= 2.0


def test_a_redis_that_is_slow_for_a_moment_ends_no_student(
    own_redis: RedisServer, settings: RuntimeSettings, good: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student that starts while an answer takes longer than its limit asks again, and is told its teachers."""
    with registered(settings, good.address), ThreadPoolExecutor() as aside, structlog.testing.capture_logs() as logs:
        monkeypatch.setattr(redis_client, "ANSWER_TIMEOUT_S", 0.2)
        stop(own_redis)
        with reader_of(BATCHES, Discovered(POOL), settings) as reader:
            epoch = aside.submit(list, reader)
            wait_until(lambda: "registry.unavailable" in [entry["event"] for entry in logs])
            monkeypatch.undo()  # the next answer is waited for as long as ever
            go_on(own_redis)
            BATCHES.check(epoch.result())
