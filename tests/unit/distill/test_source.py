"""How a reader runs its source, and what the source may do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import structlog
from support.students.fake_readers import BATCHES, batches, numbers, patiently, reader_of
from support.teachers.fakes import Behaviour, FakeTeachers, arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill import engine
from edl_runtime.errors import SampleError


def test_the_source_runs_ahead_by_a_bounded_number_of_requests() -> None:
    """While nothing is taken, a few requests for each teacher are all that is read from the source."""
    read: list[int] = []

    def source() -> Iterator[Any]:
        for number in range(1000):
            read.append(number)
            yield np.full((4, 4), number, np.float32), np.arange(4)

    with reader_of({"a:1": arithmetic, "b:2": arithmetic}, source) as reader:
        for _ in reader:
            wait_until(lambda: len(read) >= 10)
            break
    assert len(read) <= 16


def test_what_the_source_raises_is_raised_in_its_place() -> None:
    """The very exception comes after the batches before it, and the next epoch works."""
    error = RuntimeError("disk full")
    broken = [True]

    def source() -> Iterator[Any]:
        for number, batch in enumerate(batches()):
            if number == 7 and broken:
                raise error
            yield batch

    with reader_of({"a:1": patiently}, source) as reader:
        epoch = iter(reader)
        assert numbers([next(epoch) for _ in range(7)]) == list(range(7))
        with pytest.raises(RuntimeError) as caught:
            next(epoch)
        assert caught.value is error
        broken.clear()
        assert numbers(list(reader)) == list(range(BATCHES))


@pytest.mark.parametrize("teachers", [{"a:1": arithmetic}, {}])
def test_an_empty_source_makes_an_empty_epoch(teachers: dict[str, Behaviour]) -> None:
    """Even without a teacher: nobody is asked."""
    with reader_of(teachers, list) as reader:
        assert list(reader) == []


def test_the_source_is_never_run_twice_at_once() -> None:
    """An epoch waits for the source of one that was left in mid-read, and says so."""
    running, most = [0], [0]

    def source() -> Iterator[Any]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        try:
            for batch in batches():
                time.sleep(0.005)
                yield batch
        finally:
            time.sleep(0.05)
            running[0] -= 1

    with reader_of({"a:1": arithmetic}, source) as reader:
        for _ in range(3):
            for _ in reader:
                break
        assert numbers(list(reader)) == list(range(BATCHES))
    assert most == [1]


def test_waiting_for_a_busy_source_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that blocks when its epoch is left keeps the next one waiting, which the log tells."""
    monkeypatch.setattr(engine, "TELL_EVERY_S", 0.1)
    blocked = threading.Event()

    def source() -> Iterator[Any]:
        yield from batches()
        blocked.wait()

    with reader_of({"a:1": arithmetic}, source) as reader, structlog.testing.capture_logs() as logs:
        for number, _ in enumerate(reader, start=1):
            if number == BATCHES:
                break
        threading.Timer(0.6, blocked.set).start()
        assert numbers(list(reader)) == list(range(BATCHES))
    assert "source.still_busy" in [entry["event"] for entry in logs]


def test_items_without_rows_count_in_the_window() -> None:
    """A source of empty batches is not read to its end while nothing is taken."""
    read: list[int] = []

    def source() -> Iterator[Any]:
        for number in range(10_000):
            read.append(number)
            yield np.zeros((0, 4), np.float32), np.arange(0)

    with reader_of({"a:1": arithmetic}, source) as reader:
        next(iter(reader))
        wait_until(lambda: len(read) >= 5)
        time.sleep(0.1)  # in which it would read thousands
    assert len(read) <= 16


def test_a_wrong_sample_is_raised_before_it_is_sent() -> None:
    """Batches before it are delivered, nobody is asked about it, and the reader can be closed."""

    def source() -> Iterator[Any]:
        yield np.zeros((4, 4), np.float32), np.arange(4)
        yield np.zeros((4, 4)), np.arange(4)

    teachers = FakeTeachers({"a:1": arithmetic})
    with reader_of(teachers, source) as reader:
        epoch = iter(reader)
        next(epoch)
        with pytest.raises(SampleError, match=r"'x' of batch 1: got float64 \[4\], the teachers take float32 \[4\]"):
            next(epoch)
    assert sum(teachers.asked.values()) == 1
