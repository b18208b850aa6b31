"""Sources that start processes, paddle.io.DataLoader with workers above all, while a thread of ours runs them."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Generator, Iterable, Iterator
from types import FrameType, MethodType, TracebackType
from typing import Any

WORKERS_END_S = 1.0
"""How long to wait for each worker of a loader to end; one that is in the middle of an item ends after it."""


class _Thread(threading.local):
    forks = 0


_thread = _Thread()


def _count() -> None:
    _thread.forks += 1


os.register_at_fork(before=_count)


def forks() -> int:
    """Return how often this thread has forked. What `spawn` starts does not count: it shares no locks with us."""
    return _thread.forks


def let_threads_start_loaders() -> None:
    """Let Paddle's DataLoaders start workers in any thread from now on; has to be called in the main thread.

    The first of them sets a handler of SIGCHLD for all, by which the main thread learns that a worker was killed, and
    Python allows that in the main thread alone. In another thread, or where Paddle is not imported, this does nothing.
    """
    loaders = sys.modules.get("paddle.io.multiprocess_utils")
    set_handler = getattr(loaders, "_set_SIGCHLD_handler", None)
    if set_handler is not None and threading.current_thread() is threading.main_thread():
        set_handler()


class Pass:
    """One pass over a source. It has to hold the only reference to what the source returned, to close it well."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)

    def __iter__(self) -> Iterator[Any]:
        return self._items

    def close(self) -> None:
        """End it in its middle, left or failed: generators of the source, and workers of loaders that nobody else has.

        A loader of Paddle would keep its workers for ever, for a thread of its own refers to them; one that has failed
        may hang when it is collected, and one with `persistent_workers` can't begin another pass (IndexError).
        """
        loaders = _loaders_under(self._items) + _loaders_in(sys.exc_info()[2])
        if isinstance(self._items, Generator):
            self._items.close()  # here, in the thread that runs it, and not when somebody happens to forget it
        self._items = iter(())
        while loaders:
            _let_go(loaders.pop())


def _let_go(loader: Any) -> None:
    """Shut down a loader's iterator, unless somebody else has it; one that failed in any case, for it can't go on."""
    elsewhere = False
    for owner in gc.get_referrers(loader):
        if getattr(owner, "_iterator", None) is loader:  # the loader, which keeps its workers
            owner._iterator = None  # noqa: SLF001 -- and makes others
        elif not isinstance(owner, FrameType | MethodType):
            elsewhere = True
    if not elsewhere or loader._thread_done_event.is_set():  # noqa: SLF001
        loader._try_shutdown_all(WORKERS_END_S)  # noqa: SLF001 -- it has no public way to end


def _loaders_under(items: Iterator[Any]) -> list[Any]:
    """Return the running iterators of loaders with workers that `items` is, or takes its items from."""
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
    """Return the running iterators of loaders with workers that have raised what this is the trace of."""
    selves = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(trace)]
    return [each for each in selves if _is_loading(each)]


def _is_loading(one: Any) -> bool:
    return hasattr(one, "_workers") and hasattr(one, "_try_shutdown_all") and not one._shutdown  # noqa: SLF001
