"""What tests of real parts share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from integration.local_jobs import wait_until_gone

from edl_runtime.backends.local import LocalBackend


@pytest.fixture
async def backend(work_dir: Path) -> AsyncIterator[LocalBackend]:
    """A local backend without jobs, and without any process afterwards."""
    made = LocalBackend(work_dir)
    yield made
    for status in await made.list():
        await made.delete(status.name)
    wait_until_gone(work_dir)
