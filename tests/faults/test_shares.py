"""Pools that grow and are shared: who comes has work soon, and nobody is idle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.students.process import student, until_it_says
from support.students.readers import POOL, Batches, reader_of, slow_teacher, wait_for_teachers
from support.students.watching import SLACK_S, read_until, tell, together

from edl_runtime.distill import Discovered, DistillReader
from edl_runtime.settings import RuntimeSettings


@pytest.fixture
def teachers(settings: RuntimeSettings) -> Iterator[list[str]]:
    """Three teachers' addresses."""
    with together(*(slow_teacher(settings) for _ in range(3))) as teachers:
        yield [teacher.address for teacher in teachers]


@pytest.mark.slow
def test_every_teacher_is_in_use(settings: RuntimeSettings, teachers: list[str]) -> None:
    """Two students share three teachers so that all answer, and none answers both."""
    wait_for_teachers(settings, 3)
    batches = Batches(60, seconds=0.005)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as students:
        readers = [stack.enter_context(reader_of(batches, Discovered(POOL), settings)) for _ in range(2)]
        for reader in readers:  # each is told of the other
            next(iter(reader))
        begin = time.monotonic()
        while sum(reader.stats().teachers for reader in readers) != 3:
            assert time.monotonic() - begin < 10
            time.sleep(0.01)
        before = [reader.stats().answered for reader in readers]
        for epoch in students.map(whole, readers):
            batches.check(epoch)
        answered = [newly(reader, was) for reader, was in zip(readers, before, strict=True)]
    tell(f"answered: {answered}")
    assert answered[0].keys() | answered[1].keys() == set(teachers)
    assert not answered[0].keys() & answered[1].keys()


def whole(reader: DistillReader) -> list[Any]:
    return list(reader)


def newly(reader: DistillReader, before: dict[str, int]) -> dict[str, int]:
    """What each teacher has answered since."""
    counts = {address: count - before.get(address, 0) for address, count in reader.stats().answered.items()}
    return {address: count for address, count in counts.items() if count}


@pytest.mark.slow
def test_a_joining_teacher_has_its_first_batch_within_a_second(settings: RuntimeSettings) -> None:
    """Of its registering, in the middle of an epoch."""
    batches = Batches(10**6, seconds=0.005)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as aside:
        stack.enter_context(slow_teacher(settings))
        reader = stack.enter_context(reader_of(batches, Discovered(POOL), settings))

        def join() -> float:
            stack.enter_context(slow_teacher(settings))
            return time.monotonic()

        joining = None
        for _ in reader:
            joining = joining or aside.submit(join)
            if len(reader.stats().answered) == 2:
                break
        assert joining is not None
        took_s = time.monotonic() - joining.result()
    tell(f"first batch {took_s:.3f} s after a teacher was ready")
    assert took_s < 1.0 + SLACK_S


@pytest.mark.slow
def test_a_killed_student_s_teachers_are_the_others_within_its_lease(settings: RuntimeSettings) -> None:
    """Nobody has to tell that it is gone."""
    batches = Batches(60, seconds=0.005)
    with (
        together(slow_teacher(settings), slow_teacher(settings)),
        student("read", POOL, env=settings.to_env()) as other,
        reader_of(batches, Discovered(POOL), settings) as reader,
    ):
        until_it_says(other, "0")
        read_until(reader, batches, lambda: reader.stats().teachers == 1)
        other.kill()
        took_s = read_until(reader, batches, lambda: reader.stats().teachers == 2)
    tell(f"both teachers are in use {took_s:.2f} s after the other student was killed")
    assert took_s < settings.lease_ttl_s + SLACK_S
