"""Waiting: for all or the first of several coroutines, for an event so long and no longer, and for the process's end.

And what the users of an event loop share.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


@contextmanager
def paused(limit: asyncio.Timeout) -> Iterator[None]:
    """Let none of a limit's time pass in the block."""
    now = asyncio.get_running_loop().time
    left = None if (until := limit.when()) is None else until - now()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(None if left is None else now() + left)


@overload
async def all_completed(a: Coroutine[Any, Any, A], b: Coroutine[Any, Any, B], /) -> tuple[A, B]: ...
@overload
async def all_completed(
    a: Coroutine[Any, Any, A], b: Coroutine[Any, Any, B], c: Coroutine[Any, Any, C], /
) -> tuple[A, B, C]: ...
@overload
async def all_completed(*waits: Coroutine[Any, Any, T]) -> tuple[T, ...]: ...
async def all_completed(*waits: Coroutine[Any, Any, Any]) -> tuple[Any, ...]:
    """Return what all return, in order, or raise what the first to fail raises; the others are cancelled then.

    Unlike asyncio.gather it leaves none running after a failure, and loses no cancellation that comes as one fails: a
    loop that goes on after a failed look would go on after its end.
    """
    current = asyncio.current_task()
    cancelled_before = current.cancelling() if current else 0
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        if left := [task for task in tasks if not task.done()]:
            await asyncio.wait(left)
        if current and current.cancelling() > cancelled_before:
            raise asyncio.CancelledError


async def all_ended(*waits: Coroutine[Any, Any, T]) -> list[T]:
    """Return what all return, in order; raise what the first of them has raised once all have ended.

    For several steps of an end: none is left out because another one fails.
    """
    results = await asyncio.gather(*waits, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def first_completed(*waits: Coroutine[Any, Any, T]) -> T:
    """Return what the first to end returns, or raise what it raises; the others are cancelled.

    Of several that end at once a failure counts, else what the first of `waits` returns.
    """
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return next((task for task in ended if task.cancelled() or task.exception()), ended[0]).result()


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


def event_of_termination(*others: asyncio.Event) -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set from now on, instead of ending the process; needs a running loop.

    They set `others`, too.
    """
    events = [asyncio.Event(), *others]

    def terminate() -> None:
        for event in events:
            event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, terminate)
    return events[0]


class SharedInLoop(Generic[T]):
    """What the users of one event loop share: `make(*key)` for the first one, closed when the last one has left.

    `made`: what is in use, by event loop and key.
    """

    def __init__(self, make: Callable[..., T], close: Callable[[T], Awaitable[object]]) -> None:
        self._make = make
        self._close = close
        self.made: dict[Hashable, T] = {}
        self._users = Counter[Hashable]()

    @asynccontextmanager
    async def use(self, *key: Hashable) -> AsyncIterator[T]:
        """Yield what all users of this key share in the running event loop."""
        where = (asyncio.get_running_loop(), *key)
        if where not in self.made:
            self.made[where] = self._make(*key)
        self._users[where] += 1
        shared = self.made[where]
        try:
            yield shared
        finally:
            self._users[where] -= 1
            if not self._users[where]:
                del self._users[where], self.made[where]
                await self._close(shared)


async def _none_when_set(event: asyncio.Event) -> None:
    await event.wait()
