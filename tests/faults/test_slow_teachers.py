"""Teachers of different speed: each does what it can, and nobody waits for the slowest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from support.students.readers import Batches, reader_of
from support.students.watching import Asked, OddTeacher, metadata_of, read_epoch, running_odd_teacher, tell, together
from support.teachers.process import Teacher

from edl_runtime.distill import Fixed, hedging
from edl_runtime.settings import RuntimeSettings


@pytest.fixture
def three(good: Teacher, odd: OddTeacher) -> Iterator[list[OddTeacher]]:
    """Teachers of which each knows what it was asked."""
    metadata = metadata_of(good.address)
    with together(running_odd_teacher(metadata), running_odd_teacher(metadata)) as others:
        yield [odd, *others]


@pytest.mark.slow
def test_what_a_slow_teacher_is_asked_another_is_asked_too(three: list[OddTeacher]) -> None:
    """Once for a request, within the budget; the first answer counts, and waiting would take many times as long."""
    answer_s = 0.02
    batches = Batches(150, seconds=answer_s)
    with reader_of(batches, Fixed(tuple(odd.address for odd in three)), RuntimeSettings()) as reader:
        batches.check(list(reader))
        before = reader.stats()
        assert before.hedges <= 2  # this machine may be slow, too
        for odd, behaviour in zip(three, ["slower 20", "good", "good"], strict=True):
            odd.become(behaviour)
        begin = time.monotonic()
        seen, longest_gap_s = read_epoch(reader)
        took_s = time.monotonic() - begin
        batches.check(seen)
        after = reader.stats()
        window = reader._own_engine.pipeline.dispatchers[0].window
    hedges = after.hedges - before.hedges
    waiting_s = 2 * batches.count / window * 20 * answer_s
    tell(f"20 times slower: {took_s:.2f} s (by waiting {waiting_s:.1f} s), gap {longest_gap_s:.2f} s, {hedges} hedges")
    assert took_s < waiting_s / 2
    assert longest_gap_s < 20 * answer_s
    assert after.retries == 0
    assert sum(after.answered.values()) == 2 * 2 * batches.count  # two epochs of two requests a batch
    asked = Counter((request.batch, request.row) for odd in three for request in odd.asked())
    assert max(asked.values()) <= 2
    assert 0 < hedges == list(asked.values()).count(2)
    earned = hedging.BUDGET_A_REQUEST * len(asked) + hedging.BUDGET_A_SECOND * took_s
    assert hedges <= hedging.MOST_SAVED + earned
    assert not any(twice(odd.asked()) for odd in three)


def twice(asked: list[Asked]) -> bool:
    """Whether a request was asked of one teacher twice."""
    requests = [(request.batch, request.row) for request in asked]
    return len(set(requests)) < len(requests)


def test_a_teacher_four_times_as_fast_answers_four_times_as_much(three: list[OddTeacher]) -> None:
    """Nobody has told the reader which one that is."""
    batches = Batches(100, seconds=0.01)
    fast, slow, _ = three
    slow.become("slower 4")
    with reader_of(batches, Fixed((fast.address, slow.address)), RuntimeSettings()) as reader:
        batches.check(list(reader))
        answered = reader.stats().answered
    share = answered[fast.address] / answered[slow.address]
    tell(f"4 times as fast: {share:.1f} times as much")
    assert 2.5 < share < 6
