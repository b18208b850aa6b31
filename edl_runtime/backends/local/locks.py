"""File locks (flock) that processes hold as long as they live: who holds one is alive, whatever happened to it.

A lock belongs to an open file description, so processes that inherit the descriptor hold it together.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

POLL_S = 0.02
"""How often a lock is tried while another process holds it: waiting in the kernel would take a thread a waiter."""


def take(path: Path) -> int | None:
    """Return a descriptor that holds the lock at `path`, None if somebody else holds it. Creates the file.

    Who holds a lock may remove its file: that frees it, and the next one to take it makes a new file.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _try(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            return None
        if _is_still_at(path, descriptor):
            return descriptor
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock at `path`; false when there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


@asynccontextmanager
async def hold(path: Path) -> AsyncIterator[int]:
    """Wait for the lock at `path` and hold it; yields its descriptor, for a child process to hold it too."""
    while (descriptor := take(path)) is None:  # noqa: ASYNC110 - another process holds it
        await asyncio.sleep(POLL_S)
    try:
        yield descriptor
        # A process that was forked meanwhile has a copy of the descriptor, so closing ours would not free the lock.
        # After an error it may be right that a child goes on to hold it: a supervisor that is still coming up does.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextmanager
def watch(path: Path) -> Iterator[Callable[[], Awaitable[None]]]:
    """Yield what waits until nobody holds the lock that is at `path` now, even when it has been removed meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield _nothing_to_wait_for
        return

    async def released() -> None:
        while not _try(descriptor, fcntl.LOCK_SH):  # noqa: ASYNC110 - other processes hold it
            await asyncio.sleep(POLL_S)

    try:
        yield released
    finally:
        os.close(descriptor)


async def _nothing_to_wait_for() -> None:
    pass


def _is_still_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
