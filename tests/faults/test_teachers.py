"""Teachers that die, hang, come back, are slow, lie, break off and fall silent in the middle of an epoch.

A request may take ten minutes here, and a lease lasts as long: an epoch that ends has not waited for who was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

import msgspec
import psutil
import pytest
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
    slow_teacher,
)
from support.teachers.process import Teacher, wait_until

from edl_runtime.distill import Discovered, DistillReader, Fixed, dispatch_policy
from edl_runtime.registry.pools import PoolInfo, get_pool
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import RegistryTimeoutError
from edl_runtime.store.redis_client import connect

BATCHES = Batches(80, seconds=0.004)


@pytest.fixture
def settings(settings: RuntimeSettings) -> RuntimeSettings:
    return msgspec.structs.replace(settings, teacher_timeout_s=600.0)


@pytest.fixture
def quick_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers report at once what people are shown, which they do with their leases."""
    monkeypatch.setattr("edl_runtime.registry.lease.RENEW_EVERY_S", 0.1)


def test_a_killed_teacher_is_out_of_use_at_once(settings: RuntimeSettings, good: Teacher) -> None:
    """SIGKILL with requests in flight loses, repeats and reorders nothing."""
    with (
        slow_teacher(settings) as killed,
        registered(settings, good.address),
        reader_of(BATCHES, Discovered(POOL), settings) as reader,
    ):
        read_until(reader, BATCHES, all_answered(reader, 2))
        BATCHES.check(read_epoch(reader, killed.process.kill))
        wait_until(lambda: reader.stats().teachers == 1)
        stats = reader.stats()
        assert stats.retries <= 4  # what two connections were asked, and may be asked before it shows
        assert stats.retries + stats.hedges > 0  # what was hedged by then needs no retry


@pytest.mark.slow
def test_a_stopped_teacher_is_not_waited_for(settings: RuntimeSettings, good: Teacher) -> None:
    """What it was asked another answers; it is out of use with its lease, and then comes back."""
    short = msgspec.structs.replace(settings, lease_ttl_s=1.0)
    with (
        slow_teacher(short) as teacher,
        registered(settings, good.address),
        reader_of(BATCHES, Discovered(POOL), short) as reader,
        contextlib.ExitStack() as stopped,
    ):

        def stop() -> None:
            for part in (teacher.predictor, psutil.Process(teacher.process.pid)):
                part.suspend()
                stopped.callback(part.resume)

        read_until(reader, BATCHES, all_answered(reader, 2))
        read_until(reader, BATCHES, lambda: reader.stats().teachers == 2)
        BATCHES.check(read_epoch(reader, stop, when=lambda: reader.stats().teachers == 2))
        read_until(reader, BATCHES, lambda: reader.stats().teachers == 1)
        assert reader.stats().hedges + reader.stats().retries > 0  # by a hedge, or as the lease has run out before one
        answered = reader.stats().answered[teacher.address]
        stopped.close()
        read_until(reader, BATCHES, lambda: reader.stats().answered[teacher.address] > answered)
        assert reader.stats().quarantined == {}


def test_all_teachers_dead_is_a_pause_until_one_registers(settings: RuntimeSettings, good: Teacher) -> None:
    """Nothing is lost; whoever comes answers the rest."""
    metadata = metadata_of(good.address)
    with (
        running_faulty_teacher(metadata) as one,
        running_faulty_teacher(metadata) as other,
        registered(settings, one.address, other.address),
        reader_of(BATCHES, Discovered(POOL), settings) as reader,
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(1) as beside,
    ):
        registering: list[Future[None]] = []

        def register_once_all_are_lost() -> None:
            wait_until(lambda: reader.stats().teachers == 0)
            stack.enter_context(registered(settings, good.address))

        def kill_all() -> None:
            for teacher in (one, other):
                teacher.process.kill()
                teacher.process.wait()
            registering.append(beside.submit(register_once_all_are_lost))  # while reading goes on: who asks finds out

        read_until(reader, BATCHES, all_answered(reader, 2))
        BATCHES.check(read_epoch(reader, kill_all))
        registering[0].result()
        assert reader.stats().answered[good.address] > 0


def test_requests_to_a_slow_teacher_are_hedged(good: Teacher, faulty: FaultyTeacher) -> None:
    """Once for a request, of another teacher, and within the budget; the first answer counts."""
    batches = Batches(100, seconds=0.01)
    metadata = metadata_of(good.address)
    with running_faulty_teacher(metadata) as second, running_faulty_teacher(metadata) as third:
        three = [faulty, second, third]

        def asked() -> list[list[tuple[int, int]]]:
            return [[(request.batch, request.row) for request in one.requests()] for one in three]

        def twice() -> int:
            return list(Counter(chain.from_iterable(asked())).values()).count(2)

        with reader_of(batches, Fixed(tuple(one.address for one in three)), RuntimeSettings()) as reader:
            read_until(reader, batches, all_answered(reader, 3))
            wait_until(lambda: not reader.stats().in_flight)
            before = reader.stats()
            for one, behaviour in zip(three, ["slower 100", "good", "good"], strict=True):
                one.set_behaviour(behaviour)
            begin = time.monotonic()
            batches.check(list(reader))
            took_s = time.monotonic() - begin
            after = reader.stats()
            hedges = after.hedges - before.hedges
            assert hedges > 0
            wait_until(lambda: twice() == hedges)
        requests = 2 * batches.count
        assert len(set(chain.from_iterable(asked()))) == requests
        assert sum(map(len, asked())) == requests + hedges
        assert all(len(set(of_one)) == len(of_one) for of_one in asked())
    assert after.retries == 0
    assert sum(after.answered.values()) - sum(before.answered.values()) == requests
    assert (
        hedges
        <= dispatch_policy.MAX_SAVED_HEDGES
        + dispatch_policy.HEDGES_PER_REQUEST * requests
        + dispatch_policy.HEDGES_PER_SECOND * took_s
    )


WRONG = {
    "garbage": "not HTTP",
    "error": "answered 500: it broke",
    "half, then closed": "closed the connection",
    "wrong dtype": "requested was",
    "half, then silent": "took longer than 1 s",
}
WRONG_TOO = {
    "no JSON": "JSON",
    "wrong shape": "requested was",
    "a row less": "requested was",
    "wrong output": "left out",
    "silent": "took longer than 1 s",
    "mute": "took longer than 1 s",
}


def shown(settings: RuntimeSettings, address: str) -> str:
    """Return the reason of the teacher's quarantine that people are shown; empty if it is in use."""

    async def look() -> PoolInfo:
        while True:
            with contextlib.suppress(RegistryTimeoutError):  # it may be slow on busy cores
                async with connect(settings.redis_url) as client:
                    return await get_pool(client, settings.namespace, POOL)

    [teacher] = [teacher for teacher in asyncio.run(look()).teachers if teacher.address == address]
    return teacher.quarantine.reason if teacher.quarantine else ""


def in_use_and_quarantined(reader: DistillReader) -> tuple[int, set[str]]:
    stats = reader.stats()
    return stats.teachers, set(stats.quarantined)


@pytest.mark.usefixtures("quick_reports")
@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [*WRONG.items(), *(pytest.param(*wrong, marks=pytest.mark.deep) for wrong in WRONG_TOO.items())],
)
def test_a_bad_teacher_s_work_is_done_by_another_until_it_is_good_again(
    behaviour: str, reason: str, settings: RuntimeSettings, good: Teacher, faulty: FaultyTeacher
) -> None:
    """Each batch comes once, in order, with right answers; the bad one rests, people see why, and it returns."""
    batches = Batches(30, seconds=0.003)
    quick = msgspec.structs.replace(settings, teacher_timeout_s=1.0) if "longer than" in reason else settings
    with registered(settings, good.address, faulty.address), reader_of(batches, Discovered(POOL), quick) as reader:
        read_until(reader, batches, lambda: faulty.address in reader.stats().answered)
        read_until(reader, batches, lambda: not shown(settings, faulty.address))
        batches.check(read_epoch(reader, lambda: faulty.set_behaviour(behaviour)))
        # The good one rests, too, where it took longer than a second.
        read_until(reader, batches, lambda: in_use_and_quarantined(reader) == (1, {faulty.address}))
        assert reason in reader.stats().quarantined[faulty.address]
        wait_until(lambda: reason in shown(settings, faulty.address))
        answered = reader.stats().answered[faulty.address]
        faulty.set_behaviour("good")
        read_until(reader, batches, lambda: reader.stats().answered[faulty.address] > answered)
        read_until(reader, batches, lambda: in_use_and_quarantined(reader) == (2, set()))
        wait_until(lambda: not shown(settings, faulty.address))
