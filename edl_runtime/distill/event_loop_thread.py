"""Runs an asyncio event loop in a thread, for scripts that do not use asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class EventLoopThread:
    """Runs one coroutine in a thread of its own, until it returns or is stopped. Starts once."""

    def __init__(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._main = main
        self._running = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Return once the coroutine can be stopped, or has ended."""
        self._thread.start()
        self._running.wait()

    def stop(self) -> None:
        """Cancel the coroutine; doesn't wait. May be called before the start and more than once."""
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._task.cancel)

    def join(self, timeout_s: float) -> None:
        """Wait until the thread is gone, for so long at most."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(self._announced())
        finally:
            self._running.set()  # lets `start` return even if no loop could be made

    async def _announced(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._running.set()
        await self._main()
