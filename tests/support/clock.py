"""An event loop's clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio

import pytest


class LoopClock:
    """The clock of the running loop: timers and timeouts come when `advance` has passed them, and never before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time()
        monkeypatch.setattr(self._loop, "time", lambda: self._now)

    async def advance(self, seconds: float) -> None:
        """Let so much time pass, and all happen that is due then."""
        self._now += seconds
        for _ in range(20):
            await asyncio.sleep(0)
