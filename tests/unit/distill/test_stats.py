"""What a reader delivers, and what a script waits for."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.mark.parametrize("slow", ["source", "teachers"])
def test_it_is_known_whom_the_script_waits_for(slow: str) -> None:
    """While it waits: a source that is slow is not mistaken for teachers that are."""

    def seen_to_wait(whom: str, number: float) -> None:
        if (whom, number) == (slow, 5):
            wait_until(lambda: waited_for()[whom] > 0.05)

    def waited_for() -> dict[str, float]:
        stats = reader.stats()
        return {"source": stats.waited_for_source_s, "teachers": stats.waited_s - stats.waited_for_source_s}

    def source() -> Iterator[tuple[Array, Array]]:
        for number, batch in enumerate(batches()):
            seen_to_wait("source", number)
            yield batch

    def teacher(x: Array) -> dict[str, Array]:
        seen_to_wait("teachers", x[0, 0])
        return arithmetic(x)

    with reader_of({"a:1": teacher}, source) as reader:
        list(reader)
