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
from typing import TYPE_CHECKING

from edl_runtime.errors import JobLockedError

if TYPE_CHECKING:
    import psutil

POLL_S = 0.02
"""How often a lock is tried while another process holds it: waiting in the kernel would take a thread a waiter."""


LOOK_S = 0.5
"""How often it is looked who holds a lock that is waited for."""

SUSPENDED_S = 5.0
"""How long a holder may be suspended, as by Ctrl-Z."""

HOLD_LIMIT_S = 3600.0
"""How long one may wait for a holder that runs: to end a job takes as long as its grace."""


def take(path: Path) -> int | None:
    """Return a descriptor that holds the lock at `path`, None if somebody else holds it. Creates the file.

    Who holds a lock may remove its file: that frees it, and the next one to take it makes a new file.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _try(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            return None
        if is_still_at(path, descriptor):
            return descriptor
        os.close(descriptor)


def share(descriptor: int) -> bool:
    """Hold the lock together with others who share it. False if somebody has it alone; it is not held then."""
    return _try(descriptor, fcntl.LOCK_SH)


def hold_alone(descriptor: int) -> bool:
    """Share a lock no longer. False if others do; it is not held then."""
    return _try(descriptor, fcntl.LOCK_EX)


def is_still_at(path: Path, descriptor: int) -> bool:
    """Whether the lock of this descriptor is that at `path`, and not one that was removed or moved away."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


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
    """Wait for the lock at `path` and hold it; yields its descriptor, for a child process to hold it too.

    Raises JobLockedError, which names the holder, when that has been suspended for `SUSPENDED_S`, or holds the lock for
    longer than `HOLD_LIMIT_S`. What counts is time waited here: this process may have been suspended itself.
    """
    waited_s = suspended_s = 0.0
    while (descriptor := take(path)) is None:
        await asyncio.sleep(POLL_S)
        waited_s += POLL_S
        if int(waited_s / LOOK_S) == int((waited_s - POLL_S) / LOOK_S):
            continue
        holder = _holder(path)
        suspended_s = suspended_s + LOOK_S if _is_suspended(holder) else 0.0
        if suspended_s >= SUSPENDED_S or waited_s >= HOLD_LIMIT_S:
            raise JobLockedError(path.name, _described(holder), suspended=suspended_s > 0, waited_s=waited_s)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
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


def _holder(path: Path) -> psutil.Process | None:
    """Return who wrote its process id into the lock, None if that is gone: a child of it may hold the lock on."""
    import psutil

    try:
        return psutil.Process(int(path.read_text()))
    except (OSError, ValueError, psutil.Error):
        return None


def _is_suspended(holder: psutil.Process | None) -> bool:
    import psutil

    try:
        return holder is not None and holder.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _described(holder: psutil.Process | None) -> str:
    import psutil

    try:
        return f"process {holder.pid} ({holder.name()})" if holder else "a process that is unknown"
    except psutil.Error:
        return "a process that has just ended"


async def _nothing_to_wait_for() -> None:
    pass


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
