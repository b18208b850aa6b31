"""Sources that start processes: when they are called, and what becomes of the workers of loaders that are left."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Self

import pytest
import structlog
from support.students.fake_readers import batches, reader_of
from support.teachers.fakes import arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill import data_loaders, teacher_connections


class Loading:
    """An iterator of a loader with workers: like Paddle's, a part of it refers to it for ever."""

    def __init__(self) -> None:
        self._workers: list[Any] = []
        self._shutdown = False
        self._thread_done_event = threading.Event()  # set when it has failed
        self._thread = self._try_shutdown_all

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        return 1

    def _try_shutdown_all(self, timeout: float) -> None:
        del timeout
        self._shutdown = True


class Persistent:
    """A loader that keeps its iterator for the next pass."""

    def __init__(self) -> None:
        self._iterator: Loading | None = None

    def __iter__(self) -> Loading:
        self._iterator = self._iterator or Loading()
        return self._iterator


def looped(loading: Loading) -> Iterator[int]:
    for one in loading:
        yield one + 1


def left(items: Iterator[Any]) -> data_loaders.SourcePass:
    """Return a pass that has begun."""
    begun = data_loaders.SourcePass(items.__iter__)
    next(iter(begun))
    return begun


SOURCES: list[Callable[[Loading], Iterator[Any]]] = [
    iter,
    looped,
    lambda loading: map(str, looped(loading)),
    lambda loading: islice(zip(looped(loading), range(9), strict=False), 5),
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_loader_that_is_left_is_shut_down(source: Callable[[Loading], Iterator[Any]]) -> None:
    """However deep it is under what the source returned."""
    loading = Loading()
    thread = loading._thread
    begun = left(source(loading))
    del loading
    begun.close()
    assert thread.__self__._shutdown  # type: ignore[attr-defined]


def test_a_loader_that_goes_on_elsewhere_is_not_shut_down() -> None:
    """A stream from which each epoch takes some, for one."""
    kept = [Loading()]
    left(looped(kept[0])).close()
    assert not kept[0]._shutdown
    stream = [map(str, Loading())]
    left(islice(stream[0], 3)).close()
    assert next(stream[0]) == "1"
    kept[0]._thread_done_event.set()
    left(looped(kept[0])).close()
    assert kept[0]._shutdown


def test_a_loader_with_persistent_workers_makes_others() -> None:
    """Paddle's can't begin a pass before the last is over."""
    loader = Persistent()
    first = iter(loader)
    thread = first._thread
    del first
    left(iter(loader)).close()
    assert thread.__self__._shutdown  # type: ignore[attr-defined]
    assert not iter(loader)._shutdown


def fork() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_source_that_forks_is_not_called_while_the_script_trains() -> None:
    """A child would inherit locks that nobody opens again; so `epochs` is of no use to it, which the log says once."""
    training = False
    found_training = []

    def source() -> Iterator[Any]:
        found_training.append(training)
        fork()
        return islice(batches(), 3)

    with (
        reader_of({"a:1": arithmetic}, source, epochs=4) as reader,
        structlog.testing.capture_logs() as logs,
    ):
        for _ in range(4):
            for _ in reader:
                training = True
                time.sleep(0.02)  # in which it would be called
                training = False
    assert found_training == [False] * 4
    events = [entry["event"] for entry in logs if entry["event"].startswith("source")]
    assert [event for event in events if event != "source.awaited"] == ["source.forked"]  # that is said if it is slow


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_source_that_keeps_its_processes_is_called_ahead() -> None:
    """It forks in its first epoch alone; from its third on, one begins while the one before is read."""
    calls = []

    def source() -> Iterator[Any]:
        calls.append(1)
        if len(calls) == 1:
            fork()
        return islice(batches(), 3)

    with reader_of({"a:1": arithmetic}, source, epochs=4) as reader, structlog.testing.capture_logs() as logs:
        for epoch in range(4):
            for number, _ in enumerate(reader):
                if epoch in (1, 2) and number == 2:
                    wait_until(lambda: len(calls) > epoch + 1)  # noqa: B023
    assert "source.forked" not in [entry["event"] for entry in logs]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_no_child_is_forked_while_a_thread_ends() -> None:
    """Paddle cleans up as C does, after `join` has returned before Python 3.13, and holds a lock that a child needs."""
    c = ctypes.CDLL(None)
    key, may_end = ctypes.c_uint(), ctypes.create_string_buffer(64)
    assert c.sem_init(may_end, 0, 0) == 0
    assert c.pthread_key_create(ctypes.byref(key), c.sem_wait) == 0  # called at the end of each thread with its value

    def use() -> None:
        c.pthread_setspecific(key, may_end)
        data_loaders.thread_ends_here()

    thread = threading.Thread(target=use)
    thread.start()
    joins_early = sys.version_info < (3, 13)
    if not joins_early:
        c.sem_post(may_end)
    thread.join()
    still_ends = Path(f"/proc/self/task/{thread.native_id}")
    assert still_ends.exists() == joins_early
    later = threading.Timer(0.3, c.sem_post, [may_end])
    later.start()
    fork()
    assert not still_ends.exists()
    later.join()
    assert c.pthread_key_delete(key) == 0


class Garbage:
    """Only the garbage collector ends it."""

    ended = False

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        Garbage.ended = True


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_leaves_the_garbage_of_its_parent_alone() -> None:
    """A loader that has failed waits at its end for threads, which only the parent has: a child would hang."""
    gc.disable()
    try:
        Garbage()
        child = os.fork()
        if not child:
            gc.collect()
            os._exit(Garbage.ended)
        assert os.waitpid(child, 0)[1] == 0
        assert not Garbage.ended
    finally:
        gc.enable()
    gc.collect()
    assert Garbage.ended


def test_a_reader_has_its_threads_gone_before_it_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run the source, and teachers that are within this process."""
    ended: list[str] = []
    monkeypatch.setattr(data_loaders, "thread_ends_here", lambda: ended.append(threading.current_thread().name))
    monkeypatch.setattr(teacher_connections, "thread_ends_here", data_loaders.thread_ends_here)
    with reader_of({"a:1": arithmetic}, lambda: islice(batches(), 3)) as reader:
        list(reader)
    wait_until(lambda: {name.rsplit(" ", 1)[0] for name in ended} == {"edl", "edl teacher a:1"})
