"""Several pools in one process: by two readers, and by one that asks both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.students.readers import Batches, reader_of, registered
from support.students.watching import OddTeacher, metadata_of, running_odd_teacher
from support.teachers.process import Teacher, running_teacher, wait_until

from edl_runtime.distill import Discovered, DistillReader
from edl_runtime.settings import RuntimeSettings

BATCHES = Batches(60, seconds=0.004)


@pytest.fixture(scope="module")
def sums() -> Iterator[Teacher]:
    """A teacher of another model than the others, which sums."""
    with running_teacher("support.models:arithmetic") as teacher:
        yield teacher


class Pools(NamedTuple):
    """Teachers of two models: two that double, of which one may be killed, and one that sums, too."""

    doubles: list[str]
    sums: str
    mortal: OddTeacher


@pytest.fixture
def pools(settings: RuntimeSettings, good: Teacher, sums: Teacher) -> Iterator[Pools]:
    with running_odd_teacher(metadata_of(good.address)) as mortal:
        doubles = [good.address, mortal.address]
        with registered(settings, *doubles, pool="doubles"), registered(settings, sums.address, pool="sums"):
            yield Pools(doubles, sums.address, mortal)


def test_readers_of_different_pools_do_not_meet(settings: RuntimeSettings, pools: Pools) -> None:
    """Read in turns, each has its own teachers' answers; a teacher killed in one's pool is nothing to the other."""
    doubles = reader_of(BATCHES, Discovered("doubles"), settings)
    sums = reader_of(BATCHES, Discovered("sums"), settings, outputs=["sum"])
    seen: list[Any] = []
    with doubles, sums:
        for double, (x, added) in zip(doubles, sums, strict=True):
            seen.append(double)
            np.testing.assert_array_equal(double[0], x)
            np.testing.assert_array_equal(added, x.sum(axis=1))
            if len(seen) == 20:
                wait_until(lambda: doubles.stats().teachers == 2)
                pools.mortal.process.kill()
        BATCHES.check(seen)
        assert doubles.stats().answered.keys() <= set(pools.doubles)
        assert sums.stats().answered == {pools.sums: 2 * BATCHES.count}
        assert sums.stats().retries == 0


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
    with reader:
        for x, answers in reader:
            assert {name: set(given) for name, given in answers.items()} == {
                "doubles": {"double"},
                "sums": {"double", "sum"},
            }
            seen.append((x, answers["doubles"]["double"]))
            np.testing.assert_array_equal(answers["sums"]["double"], x * 2)
            np.testing.assert_array_equal(answers["sums"]["sum"], x.sum(axis=1))
            if len(seen) == 20:
                wait_until(lambda: reader.stats().teachers == 3)
                pools.mortal.process.kill()
        BATCHES.check(seen)
        answered = reader.stats().answered
        assert answered[pools.sums] == 2 * BATCHES.count
        assert sum(answered.values()) == 4 * BATCHES.count
        wait_until(lambda: reader.stats().teachers == 2)
