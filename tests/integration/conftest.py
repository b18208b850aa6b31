"""What tests of real parts share."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from integration.local_jobs import wait_until_gone

from edl_runtime.backends.local import LocalBackend
from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from integration.airflow_world import World


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
def world(tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world that must be empty of processes when its test is over."""
    from integration.airflow_world import World, left_empty  # Airflow, which most tests do without

    monkeypatch.setattr("edl_airflow.triggers.base.FIRST_EVENT_AFTER_S", 0.0)
    yield from left_empty(World(tmp_path, redis_url, namespace, monkeypatch))


@pytest.fixture
async def backend(work_dir: Path) -> AsyncIterator[LocalBackend]:
    """A local backend without jobs, and without any process afterwards."""
    made = LocalBackend(work_dir)
    yield made
    for status in await made.list():
        await made.delete(status.name)
    wait_until_gone(work_dir)
