"""Teachers that die, hang and come back in the middle of an epoch.

A request may take ten minutes here, and a lease lasts as long: an epoch that ends has not waited for who was lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import psutil
import pytest
from support.students.readers import (
    POOL,
    Batches,
    all_answered,
    metadata_of,
    read_epoch,
    read_until,
    reader_of,
    registered,
    running_odd_teacher,
    slow_teacher,
)
from support.teachers.process import Teacher, wait_until

from edl_runtime.distill import Discovered
from edl_runtime.settings import RuntimeSettings

BATCHES = Batches(80, seconds=0.004)


@pytest.fixture
def settings(settings: RuntimeSettings) -> RuntimeSettings:
    return msgspec.structs.replace(settings, teacher_timeout_s=600.0)


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
        assert 0 < reader.stats().retries <= 4  # what two connections were asked, and may be asked before it shows


@contextlib.contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


@pytest.mark.slow
def test_a_stopped_teacher_is_not_waited_for(settings: RuntimeSettings, good: Teacher) -> None:
    """What it was asked another answers; it is out of use with its lease, and then comes back."""
    short = msgspec.structs.replace(settings, lease_ttl_s=1.0)
    with (
        slow_teacher(short) as teacher,
        registered(settings, good.address),
        reader_of(BATCHES, Discovered(POOL), short) as reader,
        contextlib.ExitStack() as stop,
    ):
        read_until(reader, BATCHES, all_answered(reader, 2))
        parts = teacher.predictor, psutil.Process(teacher.process.pid)
        BATCHES.check(read_epoch(reader, lambda: stop.enter_context(stopped(*parts))))
        assert reader.stats().hedges > 0
        read_until(reader, BATCHES, lambda: reader.stats().teachers == 1)
        answered = reader.stats().answered[teacher.address]
        stop.close()
        read_until(reader, BATCHES, lambda: reader.stats().answered[teacher.address] > answered)
        assert reader.stats().quarantined == {}


def test_all_teachers_dead_is_a_pause_until_one_registers(settings: RuntimeSettings, good: Teacher) -> None:
    """Nothing is lost; whoever comes answers the rest."""
    metadata = metadata_of(good.address)
    with (
        running_odd_teacher(metadata) as one,
        running_odd_teacher(metadata) as other,
        registered(settings, one.address, other.address),
        reader_of(BATCHES, Discovered(POOL), settings) as reader,
        contextlib.ExitStack() as stack,
    ):

        def kill_all() -> None:
            for teacher in (one, other):
                teacher.process.kill()
                teacher.process.wait()
            wait_until(lambda: reader.stats().teachers == 0)
            stack.enter_context(registered(settings, good.address))

        BATCHES.check(read_epoch(reader, kill_all, when=all_answered(reader, 2)))
        assert reader.stats().answered[good.address] > 0
