"""A teacher that is slower than the others: nobody waits for it."""

from __future__ import annotations

import time
from collections import Counter
from itertools import chain

from support.students.readers import Batches, OddTeacher, metadata_of, reader_of, running_odd_teacher
from support.teachers.process import Teacher, wait_until

from edl_runtime.distill import Fixed, hedging
from edl_runtime.settings import RuntimeSettings


def test_what_a_slow_teacher_is_asked_another_is_asked_too(good: Teacher, odd: OddTeacher) -> None:
    """Once for a request, of another teacher, and within the budget; the first answer counts."""
    batches = Batches(100, seconds=0.01)
    metadata = metadata_of(good.address)
    with running_odd_teacher(metadata) as second, running_odd_teacher(metadata) as third:
        three = [odd, second, third]

        def asked() -> list[list[tuple[int, int]]]:
            return [[(request.batch, request.row) for request in one.asked()] for one in three]

        def twice() -> int:
            return list(Counter(chain.from_iterable(asked())).values()).count(2)

        with reader_of(batches, Fixed(tuple(one.address for one in three)), RuntimeSettings()) as reader:
            batches.check(list(reader))
            wait_until(lambda: not reader.stats().in_flight)
            before = reader.stats()
            for one, behaviour in zip(three, ["slower 100", "good", "good"], strict=True):
                one.become(behaviour)
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
    assert sum(after.answered.values()) == 2 * requests
    assert hedges <= hedging.MOST_SAVED + hedging.BUDGET_A_REQUEST * requests + hedging.BUDGET_A_SECOND * took_s
