"""Several pools in one process: by two readers, and by one that asks both."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from support.students.readers import Batches, metadata_of, reader_of, registered, running_faulty_teacher
from support.teachers.process import Teacher, running_teacher, wait_until

from edl_runtime.distill import Discovered, DistillReader
from edl_runtime.settings import RuntimeSettings

BATCHES = Batches(60, seconds=0.004)


def test_a_mixture_and_a_reader_of_one_pool_go_on_when_a_teacher_of_the_other_is_killed(
    settings: RuntimeSettings, good: Teacher
) -> None:
    """Read in turns, each sample has each pool's answers by name, once; nothing of the fault is in the other pool."""
    with contextlib.ExitStack() as stack:
        sums = stack.enter_context(running_teacher("support.models:arithmetic")).address
        mortal = stack.enter_context(running_faulty_teacher(metadata_of(good.address)))
        stack.enter_context(registered(settings, good.address, mortal.address, pool="doubles"))
        stack.enter_context(registered(settings, sums, pool="sums"))
        mixture = DistillReader(
            BATCHES,
            inputs=["x"],
            teachers={"doubles": Discovered("doubles"), "sums": Discovered("sums")},
            outputs={"doubles": ["double"], "sums": ["double", "sum"]},
            teacher_batch_size=4,
            settings=settings,
        )
        single = reader_of(BATCHES, Discovered("sums"), settings, outputs=["sum"])
        seen: list[Any] = []
        with mixture, single:
            for (x, answers), (same_x, added) in zip(mixture, single, strict=True):
                assert {name: set(given) for name, given in answers.items()} == {
                    "doubles": {"double"},
                    "sums": {"double", "sum"},
                }
                seen.append((x, answers["doubles"]["double"]))
                np.testing.assert_array_equal(same_x, x)
                np.testing.assert_array_equal(answers["sums"]["double"], x * 2)
                for sum_of_one in (answers["sums"]["sum"], added):
                    np.testing.assert_array_equal(sum_of_one, x.sum(axis=1))
                if len(seen) == 20:
                    wait_until(lambda: mixture.stats().teachers == 3)
                    mortal.process.kill()
            BATCHES.check(seen)
            answered = mixture.stats().answered
            assert answered[sums] == 2 * BATCHES.count
            assert sum(answered.values()) == 4 * BATCHES.count
            assert single.stats().answered == {sums: 2 * BATCHES.count}
            assert single.stats().retries == 0
            wait_until(lambda: mixture.stats().teachers == 2)
