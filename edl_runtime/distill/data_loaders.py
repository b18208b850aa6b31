"""Runs sources that start processes, such as paddle.io.DataLoader with workers, in a thread."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from types import FrameType, MethodType, TracebackType
from typing import Any

WORKERS_END_S = 1.0
"""How long to wait for each worker of a loader to end; one that is in the middle of an item ends after it."""

ENDED_WITHIN_S = 5.0
"""How long a fork waits for threads to end; they take about a millisecond, more on a busy machine."""

_NEEDS_MAIN_THREAD = "signal only works in main thread"


class _ForkCounter(threading.local):
    forks = 0


_thread = _ForkCounter()


_ending_threads: set[int] = set()


def thread_ends_here() -> None:
    """Delay forks of this process until the current thread, which has used Paddle, is gone. Call it last in the thread.

    Paddle cleans up after a thread when Python is done with it and `join` has returned. It holds a lock meanwhile that
    a forked child needs for its first tensor: a child forked in that moment would hang.
    """
    _drop_ended_threads()
    _ending_threads.add(threading.get_native_id())


def _drop_ended_threads() -> None:
    for thread in tuple(_ending_threads):
        if not Path(f"/proc/self/task/{thread}").exists():
            _ending_threads.discard(thread)


def _before_fork() -> None:
    _thread.forks += 1
    until = time.monotonic() + ENDED_WITHIN_S
    _drop_ended_threads()
    while _ending_threads and time.monotonic() < until:
        time.sleep(0.001)  # there is no event for the end of a kernel thread
        _drop_ended_threads()
    _ending_threads.clear()


os.register_at_fork(before=_before_fork, after_in_child=gc.freeze)
"""A child never collects what was garbage in its parent: the end of a loader that failed there waits for its threads,
which a child does not have."""


def fork_count() -> int:
    """Return how often this thread has forked. Spawned processes don't count: they inherit no locks."""
    return _thread.forks


def allow_loaders_in_threads() -> None:
    """Let Paddle's DataLoaders start workers in any thread from now on; without Paddle, do nothing.

    Each sets a handler of SIGCHLD, which detects killed workers at once, and Python allows that in the main thread
    only. This sets it now. Loaders in other threads then skip it: they check their workers every five seconds anyway.
    """
    loading = _paddles_loading()
    set_handler = getattr(loading, "_set_SIGCHLD_handler", None)
    if set_handler is None:
        return
    if not hasattr(set_handler, "__wrapped__"):
        set_handler = loading._set_SIGCHLD_handler = _in_main_thread(set_handler)  # noqa: SLF001 -- it is no option
    set_handler()


def _paddles_loading() -> Any:
    """Return Paddle's module of loaders' iterators, None unless it has been imported."""
    return sys.modules.get("paddle.io.dataloader.dataloader_iter")


def _in_main_thread(own: Callable[[], None]) -> Callable[[], None]:
    """Return a function that does nothing in other threads."""

    @functools.wraps(own)
    def only_there() -> None:
        if threading.current_thread() is threading.main_thread():
            own()

    return only_there


class SourcePass:
    """One pass over a source. Must hold the only reference to what the source returned, to be able to close it."""

    def __init__(self, source: Callable[[], Iterable[Any]]) -> None:
        self._items: Iterator[Any] = iter(())
        try:
            self._items = iter(source())
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Any]:
        return self._items

    def close(self) -> None:
        """End an unfinished or failed pass: close generators, and workers of loaders that nothing else refers to.

        A Paddle loader would otherwise keep its workers, since its own thread refers to them. A failed one may hang
        when it is collected, and one with `persistent_workers` can't begin another pass (IndexError).
        """
        _, error, trace = sys.exc_info()
        if isinstance(error, ValueError) and _NEEDS_MAIN_THREAD in str(error):
            error.add_note(
                "Import paddle.io before the reader is first iterated: then its loaders start in any thread."
            )
        loaders = _loaders_under(self._items) + _loaders_in(trace)
        if isinstance(self._items, Generator):
            self._items.close()  # in the thread that runs it, not in whichever collects it
        self._items = iter(())
        while loaders:
            _shut_down_loader(loaders.pop())


def _shut_down_loader(loader: Any) -> None:
    """Shut down a loader's iterator if it failed or nothing else refers to it."""
    elsewhere = False
    for owner in gc.get_referrers(loader):
        if getattr(owner, "_iterator", None) is loader:  # the loader, with persistent workers
            owner._iterator = None  # noqa: SLF001 -- so that it makes new ones
        elif not isinstance(owner, FrameType | MethodType):
            elsewhere = True
    has_failed = loader._thread is None or loader._thread_done_event.is_set()  # noqa: SLF001 -- before its thread began
    if has_failed or not elsewhere:
        if loading := _paddles_loading():
            loading.core._erase_process_pids(id(loader))  # noqa: SLF001 -- how its workers end is no error any more
        loader._try_shutdown_all(WORKERS_END_S)  # noqa: SLF001 -- it has no public way to end


def _loaders_under(items: Iterator[Any]) -> list[Any]:
    """Return the running iterators of loaders with workers that `items` is or reads from."""
    found: list[Any] = []
    seen: set[int] = set()
    ahead: list[Any] = [items]
    while ahead:
        one = ahead.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if _is_loading(one):
            found.append(one)
        else:
            ahead += [each for each in gc.get_referents(one) if isinstance(each, Iterator | tuple)]
    return found


def _loaders_in(trace: TracebackType | None) -> list[Any]:
    """Return the running iterators of loaders with workers in a traceback."""
    selves = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(trace)]
    return [each for each in selves if _is_loading(each)]


def _is_loading(one: Any) -> bool:
    return hasattr(one, "_workers") and hasattr(one, "_try_shutdown_all") and not one._shutdown  # noqa: SLF001
