"""What a reader delivers, and what a script waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.students.fake_readers import batches, reader_of
from support.teachers.fakes import arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill.stats import ReaderStats, Tally, together
from edl_runtime.protocol.tensors import Array


def test_a_wait_that_goes_on_counts() -> None:
    """A script that waits for a minute is seen to wait long before that is over."""
    tally = Tally(0.0)
    tally.begin_epoch(100.0)
    tally.begin_wait("source", 100.0)
    tally.await_teachers(102.0)
    during = tally.stats([], {}, 120.0)
    assert (during.waited_s, during.waited_for_source_s, during.waiting) == (20, 2, 1)
    tally.end_wait(120.0)
    tally.deliver(samples=8, cached=0, answered_by=["a:1"], now=120.0)
    after = tally.stats([], {}, 125.0)
    assert (after.waited_s, after.waited_for_source_s) == (20, 2)
    assert after.waiting == pytest.approx(0.5)


def test_readers_of_one_script_add_up() -> None:
    """Counts are sums, and who answered both has its answers together."""
    first = ReaderStats(
        batches=2, samples=20, teachers=1, answered={"a:1": 2}, waiting=0.7, waited_s=3, epoch=4, cached=8
    )
    second = ReaderStats(batches=1, samples=5, teachers=2, answered={"a:1": 1, "b:2": 1}, waiting=0.6, retries=2)
    both = together([first, second])
    assert (both.batches, both.samples, both.teachers, both.retries, both.epoch) == (3, 25, 3, 2, 0)
    assert both.cached == 8
    assert both.answered == {"a:1": 3, "b:2": 1}
    assert (both.waiting, both.waited_s) == (1, 3)
    assert together([]) == ReaderStats()


def _slowly() -> Iterator[tuple[Array, Array]]:
    for batch in batches():
        time.sleep(0.01)
        yield batch


def _slow_teacher(x: Array) -> dict[str, Array]:
    time.sleep(0.01)
    return arithmetic(x)


@pytest.mark.parametrize(
    ("source", "teacher", "is_source"), [(_slowly, arithmetic, True), (batches, _slow_teacher, False)]
)
def test_it_is_known_whom_the_script_waits_for(source: Any, teacher: Any, is_source: bool) -> None:  # noqa: FBT001
    """A source that is slow is not mistaken for teachers that are."""
    with reader_of({"a:1": teacher}, source) as reader:
        list(reader)
        stats = reader.stats()
    assert stats.waited_s > 0.1
    assert stats.waiting > 0.5
    share = stats.waited_for_source_s / stats.waited_s
    assert share > 0.7 if is_source else share < 0.3


def test_what_is_asked_now_is_counted() -> None:
    """While a teacher takes its time over the next batch that is in flight; at the end nothing is."""
    goes_on = threading.Event()

    def after_the_first(x: Array) -> dict[str, Array]:
        if x.max() > 0:
            goes_on.wait()
        return arithmetic(x)

    with reader_of({"a:1": after_the_first}) as reader:
        epoch = iter(reader)
        next(epoch)
        wait_until(lambda: reader.stats().in_flight > 0)
        goes_on.set()
        list(epoch)
        assert (reader.stats().in_flight, reader.stats().queued) == (0, 0)
