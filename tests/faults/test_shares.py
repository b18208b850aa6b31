"""A pool that students share: nobody is idle, and a killed student keeps no teacher."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from support.students.process import student, until_it_says
from support.students.readers import POOL, Batches, reader_of, registered
from support.students.watching import OddTeacher, metadata_of, read_until, running_odd_teacher
from support.teachers.process import Teacher, wait_until

from edl_runtime.distill import Discovered, DistillReader
from edl_runtime.settings import RuntimeSettings

BATCHES = Batches(40, seconds=0.004)


def test_every_teacher_is_in_use(settings: RuntimeSettings, good: Teacher, odd: OddTeacher) -> None:
    """Two students share three teachers so that all answer, and none answers both."""
    with running_odd_teacher(metadata_of(good.address)) as third, contextlib.ExitStack() as stack:
        teachers = {good.address, odd.address, third.address}
        stack.enter_context(registered(settings, *teachers))
        readers = [stack.enter_context(reader_of(BATCHES, Discovered(POOL), settings)) for _ in range(2)]
        for reader in readers:  # each is told of the other
            next(iter(reader))
        wait_until(lambda: sum(reader.stats().teachers for reader in readers) == 3)
        before = [reader.stats().answered for reader in readers]
        with ThreadPoolExecutor() as students:
            for epoch in students.map(whole, readers):
                BATCHES.check(epoch)
        answered = [newly(reader, was) for reader, was in zip(readers, before, strict=True)]
    assert answered[0] | answered[1] == teachers
    assert not answered[0] & answered[1]


def whole(reader: DistillReader) -> list[Any]:
    return list(reader)


def newly(reader: DistillReader, before: dict[str, int]) -> set[str]:
    """Who has answered since."""
    return {address for address, count in reader.stats().answered.items() if count > before.get(address, 0)}


@pytest.mark.slow
def test_a_killed_student_s_teachers_are_the_others_with_its_lease(
    settings: RuntimeSettings, good: Teacher, odd: OddTeacher
) -> None:
    """Nobody has to tell that it is gone."""
    mortal = msgspec.structs.replace(settings, lease_ttl_s=1.0)
    with (
        registered(settings, good.address, odd.address),
        student("read", POOL, env=mortal.to_env()) as other,
        reader_of(BATCHES, Discovered(POOL), settings) as reader,
    ):
        until_it_says(other, "0")
        read_until(reader, BATCHES, lambda: reader.stats().teachers == 1)
        other.kill()
        read_until(reader, BATCHES, lambda: reader.stats().teachers == 2)
