"""An event loop's clock that only a test advances."""

from __future__ import annotations

import asyncio

import pytest


class LoopClock:
    """The clock of the running loop: timers and timeouts fire when `advance` has passed them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time()
        monkeypatch.setattr(self._loop, "time", lambda: self._now)

    async def advance(self, seconds: float) -> None:
        """Advance the clock, and let due callbacks run."""
        self._now += seconds
        for _ in range(20):
            await asyncio.sleep(0)
