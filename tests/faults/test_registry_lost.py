"""A student's reading while Redis is killed, emptied, silent and not there.

What a killed discovery endpoint does to a student is in tests/integration/test_discovery_faults.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from support.students.readers import POOL, Batches, reader_of, slow_teacher, wait_for_teachers
from support.students.watching import SLACK_S, all_answered, read_epoch, read_until, tell, together

from edl_runtime.distill import Discovered
from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.server import RedisServer

BATCHES = Batches(150, seconds=0.005)
STALL_S = 0.5


@pytest.fixture
def settings(own_redis: RedisServer) -> RuntimeSettings:
    return RuntimeSettings(redis_url=own_redis.url, teacher_wait_s=15.0, lease_ttl_s=1.0)


def kill(server: RedisServer) -> None:
    server.kill()


def restart_empty(server: RedisServer) -> None:
    server.kill()
    server.start()


def stop(server: RedisServer) -> None:
    os.kill(server.pid, signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [kill, restart_empty, stop])
def test_reading_goes_on_and_new_teachers_are_used_when_redis_is_back(
    fault: Callable[[RedisServer], None], own_redis: RedisServer, settings: RuntimeSettings
) -> None:
    """Nothing stalls, the teachers in use stay in use, and then the student hears of others as ever."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(together(slow_teacher(settings), slow_teacher(settings)))
        reader = stack.enter_context(reader_of(BATCHES, Discovered(POOL), settings))
        wait_for_teachers(settings, 2)
        seen, longest_gap_s = read_epoch(reader, lambda: fault(own_redis), when=all_answered(reader, 2))
        BATCHES.check(seen)
        begin = time.monotonic()
        while time.monotonic() - begin < 2 * settings.lease_ttl_s:
            seen, gap_s = read_epoch(reader)
            BATCHES.check(seen)
            longest_gap_s = max(longest_gap_s, gap_s)
            assert reader.stats().teachers == 2
        tell(f"{fault.__name__}: longest gap {longest_gap_s:.3f} s")
        assert longest_gap_s < STALL_S + SLACK_S
        if fault is stop:
            os.kill(own_redis.pid, signal.SIGCONT)
        own_redis.start()
        stack.enter_context(slow_teacher(settings))
        read_until(reader, BATCHES, lambda: reader.stats().teachers == 3)


@pytest.mark.parametrize("fault", [kill, stop])
def test_no_redis_at_the_start_is_said_soon(
    fault: Callable[[RedisServer], None], own_redis: RedisServer, settings: RuntimeSettings
) -> None:
    """The first iteration raises what is wrong with which Redis; the source was not even called."""

    def source() -> Iterator[object]:
        called.append(True)
        yield from BATCHES()

    called: list[bool] = []
    fault(own_redis)
    begin = time.monotonic()
    with (
        reader_of(source, Discovered(POOL), settings) as reader,
        pytest.raises(RegistryUnavailableError, match=f"Redis at 127.0.0.1:{own_redis.port} can't be used"),
    ):
        list(reader)
    assert time.monotonic() - begin < 3.0 + SLACK_S
