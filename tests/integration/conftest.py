"""What tests of real parts share."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from integration.local_jobs import wait_until_gone

from edl_runtime.backends.local import LocalBackend
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


@pytest.fixture
async def backend(work_dir: Path) -> AsyncIterator[LocalBackend]:
    """A local backend without jobs, and without any process afterwards."""
    made = LocalBackend(work_dir)
    yield made
    for status in await made.list():
        await made.delete(status.name)
    wait_until_gone(work_dir)
