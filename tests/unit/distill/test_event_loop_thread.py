"""A loop in a thread beside a script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from edl_runtime.distill.event_loop_thread import EventLoopThread

PATIENCE_S = 60.0


def test_stopping_cancels_what_runs() -> None:
    """Once started it can be stopped at once, and again, and later."""
    cancelled = threading.Event()

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    thread = EventLoopThread("edl test", main)
    thread.stop()
    thread.start()
    thread.stop()
    thread.stop()
    thread.join(PATIENCE_S)
    assert cancelled.is_set()
    thread.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_start_returns_when_no_loop_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without descriptors left gets the error in its log, and a script that goes on."""

    def no_descriptors(main: Coroutine[Any, Any, None]) -> None:
        main.close()
        raise OSError(24, "Too many open files")

    async def main() -> None:
        """Never run."""

    monkeypatch.setattr(asyncio, "run", no_descriptors)
    thread = EventLoopThread("edl test", main)
    starting = threading.Thread(target=thread.start, daemon=True)
    starting.start()
    starting.join(PATIENCE_S)
    assert not starting.is_alive()
    thread.join(PATIENCE_S)
