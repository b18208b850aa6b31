"""What the tests of faults share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from faults.watching import OddTeacher, metadata_of, running_odd_teacher
from teacher_process import Teacher, running_teacher

from edl_runtime.settings import RuntimeSettings


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """No thread of a reader outlives its test."""
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("edl")] == []


@pytest.fixture
def settings(redis_url: str, namespace: str) -> RuntimeSettings:
    """Settings of a student with a registry of its own, in which the dead are noticed soon."""
    return RuntimeSettings(redis_url=redis_url, namespace=namespace, teacher_wait_s=15.0, lease_ttl_s=1.0)


@pytest.fixture(scope="session")
def good() -> Iterator[Teacher]:
    """A real teacher that no test may hurt."""
    with running_teacher("served_models:slow") as teacher:
        yield teacher


@pytest.fixture(scope="session")
def odd_process(good: Teacher) -> Iterator[OddTeacher]:
    with running_odd_teacher(metadata_of(good.address)) as teacher:
        yield teacher


@pytest.fixture
def odd(odd_process: OddTeacher) -> OddTeacher:
    """A teacher of the same model that does as it is told."""
    odd_process.become("good")
    return odd_process
