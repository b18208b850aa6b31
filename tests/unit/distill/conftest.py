"""What the tests of the student's side share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """No thread of a reader outlives its test."""
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("edl")] == []
