"""Fixtures of the tests of faults."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from support.slow_redis import redis_may_be_slow  # noqa: F401
from support.students.readers import FaultyTeacher, metadata_of, running_faulty_teacher
from support.teachers.process import Teacher, running_teacher

from edl_runtime.settings import RuntimeSettings


@pytest.fixture
def settings(settings: RuntimeSettings) -> RuntimeSettings:
    """With leases that do not expire on a busy machine; tests of killed members set shorter ones."""
    return msgspec.structs.replace(settings, teacher_wait_s=60.0, lease_ttl_s=600.0)


@pytest.fixture(scope="session")
def good() -> Iterator[Teacher]:
    """A real teacher without faults."""
    with running_teacher("support.models:slow") as teacher:
        yield teacher


@pytest.fixture(scope="session")
def faulty_process(good: Teacher) -> Iterator[FaultyTeacher]:
    with running_faulty_teacher(metadata_of(good.address)) as teacher:
        yield teacher


@pytest.fixture
def faulty(faulty_process: FaultyTeacher) -> FaultyTeacher:
    """A teacher of the same model with faults on command."""
    faulty_process.set_behaviour("good")
    return faulty_process
