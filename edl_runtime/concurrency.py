"""Waiting: for the first of several coroutines, for an event so long and no longer, and for the end of the process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def first_completed(*waits: Coroutine[Any, Any, T]) -> T:
    """Return what the first to end returns, or raise what it raises; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return done.pop().result()


async def unless_stopped(stop: asyncio.Event, wait: Coroutine[Any, Any, T]) -> T | None:
    """Return what `wait` returns, or None when `stop` comes first."""
    return await first_completed(wait, _none_when_set(stop))


async def wait_for_event(event: asyncio.Event, limit_s: float) -> bool:
    """Wait until the event is set, for `limit_s` at most; return whether it is.

    Unlike asyncio.wait_for on Python 3.11 it loses no cancellation that comes as the event is set.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()


def event_of_termination() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set from now on, instead of ending the process; needs a running loop."""
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


async def _none_when_set(event: asyncio.Event) -> None:
    await event.wait()
