"""The backends that have to keep the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edl_runtime.backends.base import Backend
from edl_runtime.backends.local import LocalBackend


@pytest.fixture(params=["local"])
async def backend(request: pytest.FixtureRequest, work_dir: Path) -> AsyncIterator[Backend]:
    """Each backend in turn, without jobs; what a test leaves is removed."""
    made = {"local": lambda: LocalBackend(work_dir)}[request.param]()
    yield made
    for status in await made.list():
        await made.delete(status.name)
