"""Long time limits of Redis, for tests on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def patient_with_redis() -> Iterator[None]:
    """Wait for answers longer than the second or two of users."""
    with pytest.MonkeyPatch.context() as patched:
        for limit in ("CONNECT_TIMEOUT_S", "ANSWER_TIMEOUT_S"):
            patched.setattr(f"edl_runtime.store.redis_client.{limit}", 60.0)
        yield


@pytest.fixture(autouse=True, scope="module")
def redis_may_be_slow() -> Iterator[None]:
    """Wait long for answers in all tests of a module."""
    with patient_with_redis():
        yield
