"""File locks (flock). The kernel releases a lock when its holder ends, so a held lock proves that the holder is alive.

A lock belongs to an open file description, so processes that inherit the descriptor hold it together.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edl_runtime.errors import JobLockedError

if TYPE_CHECKING:
    import psutil

POLL_S = 0.02
"""How often a held lock is tried again. A blocking flock would need a thread for each waiter."""

CHECK_HOLDER_S = 0.5
"""How often the holder of the lock is checked."""

SUSPENDED_S = 5.0
"""How long a holder may be suspended, as by Ctrl-Z."""

HOLD_LIMIT_S = 3600.0
"""Longest wait for a running holder: stopping a job takes as long as its grace period."""


_READ_AT_ONCE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would wait for a writer


def take(path: Path) -> int | None:
    """Return a descriptor that holds the lock at `path`, None if another process holds it. Creates the file.

    The holder may remove the file, which frees the lock; the next `take` creates a new file.
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
    """Share the lock; return False, without the lock, if another process holds it exclusively."""
    return _try(descriptor, fcntl.LOCK_SH)


def hold_alone(descriptor: int) -> bool:
    """Turn a shared lock into an exclusive one; return False, without the lock, if others share it."""
    return _try(descriptor, fcntl.LOCK_EX)


def is_still_at(path: Path, descriptor: int) -> bool:
    """Whether this descriptor's file is still the one at `path`, and was not removed or moved."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Whether a process holds the lock at `path`; false when there is no such file."""
    try:
        descriptor = os.open(path, _READ_AT_ONCE)
    except FileNotFoundError:
        return False
    try:
        return not _try(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


@asynccontextmanager
async def hold(path: Path) -> AsyncIterator[int]:
    """Wait for the lock at `path` and hold it; yields its descriptor, for a child process to hold it too.

    Raises JobLockedError when the holder has been suspended for `SUSPENDED_S`, or holds the lock for `HOLD_LIMIT_S`.
    Counts only time spent waiting, because this process may have been suspended itself.
    """
    waited_s = suspended_s = 0.0
    while (descriptor := take(path)) is None:
        await asyncio.sleep(POLL_S)
        waited_s += POLL_S
        if int(waited_s / CHECK_HOLDER_S) == int((waited_s - POLL_S) / CHECK_HOLDER_S):
            continue
        holder = _holder(path)
        suspended_s = suspended_s + CHECK_HOLDER_S if _is_suspended(holder) else 0.0
        if suspended_s >= SUSPENDED_S or waited_s >= HOLD_LIMIT_S:
            raise JobLockedError(path.name, _described(holder), suspended=suspended_s > 0, waited_s=waited_s)
    try:
        with suppress(OSError):  # a full disk; only `_holder` reads it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
        # Unlock explicitly: a process forked meanwhile has a copy of the descriptor. Not after an error: then a child,
        # such as a supervisor that is still starting, may have to keep the lock.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextmanager
def watch(path: Path) -> Iterator[Callable[[], Awaitable[None]]]:
    """Yield a function that waits until the lock now at `path` is released, even if its file is removed."""
    try:
        descriptor = os.open(path, _READ_AT_ONCE)
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
    """Return the process whose id is in the lock's file; None if it has ended, and a child may hold the lock."""
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
        return f"process {holder.pid} ({holder.name()})" if holder else "an unknown process"
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
