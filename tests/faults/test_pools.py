"""Several pools in one process: by two readers, and by one that asks both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.students.readers import Batches, reader_of
from support.students.watching import SLACK_S, tell, together
from support.teachers.process import Teacher, running_teacher, wait_until

from edl_runtime.distill import Discovered, DistillReader
from edl_runtime.settings import RuntimeSettings

STALL_S = 0.5
BATCHES = Batches(80, seconds=0.005)


class Pools(NamedTuple):
    """Teachers of two models."""

    doubles: list[Teacher]
    sums: list[Teacher]


@pytest.fixture
def pools(settings: RuntimeSettings) -> Iterator[Pools]:
    """Two teachers that take a while and double, and one that answers at once, sums among it."""

    def teacher(pool: str, model: str) -> AbstractContextManager[Teacher]:
        return running_teacher(f"support.models:{model}", "--pool", pool, env=settings.to_env())

    with together(teacher("doubles", "slow"), teacher("doubles", "slow"), teacher("sums", "arithmetic")) as teachers:
        yield Pools(teachers[:2], teachers[2:])


@pytest.mark.slow
def test_readers_of_different_pools_do_not_meet(settings: RuntimeSettings, pools: Pools) -> None:
    """Read in turns, each has its own teachers' answers; a teacher killed in one's pool is nothing to the other."""
    doubles = reader_of(BATCHES, Discovered("doubles"), settings)
    sums = reader_of(BATCHES, Discovered("sums"), settings, outputs=["sum"])
    seen: list[Any] = []
    longest_s = 0.0
    with doubles, sums:
        last = time.monotonic()
        for double, (x, added) in zip(doubles, sums, strict=True):
            longest_s = max(longest_s, time.monotonic() - last) if len(seen) > 20 else 0.0
            seen.append(double)
            np.testing.assert_array_equal(double[0], x)
            np.testing.assert_array_equal(added, x.sum(axis=1))
            if len(seen) == 20:
                wait_until(lambda: doubles.stats().teachers == 2)
                pools.doubles[0].process.kill()
            last = time.monotonic()
        BATCHES.check(seen)
        assert doubles.stats().answered.keys() <= {teacher.address for teacher in pools.doubles}
        assert sums.stats().answered == {pools.sums[0].address: 2 * BATCHES.count}
        assert sums.stats().retries == 0
    tell(f"longest gap {longest_s:.3f} s")
    assert longest_s < STALL_S + SLACK_S


@pytest.mark.slow
def test_a_mixture_goes_on_when_a_teacher_of_one_pool_is_killed(settings: RuntimeSettings, pools: Pools) -> None:
    """Each sample has both pools' answers by name, once."""
    reader = DistillReader(
        BATCHES,
        inputs=["x"],
        teachers={"doubles": Discovered("doubles"), "sums": Discovered("sums")},
        outputs={"doubles": ["double"], "sums": ["double", "sum"]},
        teacher_batch_size=4,
        settings=settings,
    )
    seen: list[Any] = []
    longest_s = 0.0
    with reader:
        last = time.monotonic()
        for x, answers in reader:
            longest_s = max(longest_s, time.monotonic() - last) if len(seen) > 20 else 0.0
            assert {name: set(given) for name, given in answers.items()} == {
                "doubles": {"double"},
                "sums": {"double", "sum"},
            }
            seen.append((x, answers["doubles"]["double"]))
            np.testing.assert_array_equal(answers["sums"]["double"], x * 2)
            np.testing.assert_array_equal(answers["sums"]["sum"], x.sum(axis=1))
            if len(seen) == 20:
                wait_until(lambda: reader.stats().teachers == 3)
                pools.doubles[0].process.kill()
            last = time.monotonic()
        BATCHES.check(seen)
        answered = reader.stats().answered
        assert answered[pools.sums[0].address] == 2 * BATCHES.count
        assert sum(answered.values()) == 4 * BATCHES.count
        assert reader.stats().teachers == 2
    tell(f"longest gap {longest_s:.3f} s")
    assert longest_s < STALL_S + SLACK_S
