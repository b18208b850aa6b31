"""A Redis that may take its time, for tests of what is right and not of how soon it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def redis_may_be_slow() -> Iterator[None]:
    """Wait for its answers: on a busy machine they may come after the second or two that users wait for them."""
    with pytest.MonkeyPatch.context() as patched:
        for limit in ("CONNECT_TIMEOUT_S", "ANSWER_TIMEOUT_S"):
            patched.setattr(f"edl_runtime.store.redis_client.{limit}", 60.0)
        yield
