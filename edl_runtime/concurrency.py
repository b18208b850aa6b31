"""Waiting for the first of several coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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


async def _none_when_set(event: asyncio.Event) -> None:
    await event.wait()
