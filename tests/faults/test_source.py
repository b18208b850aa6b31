"""A source that raises, hangs and ends early, and epochs that are left: with a real teacher, one epoch ahead or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from support.students.readers import Batches, reader_of
from support.students.watching import read_epoch
from support.teachers.process import Teacher, wait_until

from edl_runtime.distill import DistillReader, Fixed, engine, patience
from edl_runtime.distill.pipeline import MOST_AHEAD
from edl_runtime.settings import RuntimeSettings

BATCHES = Batches(30, seconds=0.002)


class Epochs:
    """A source that counts how often it is called, and of which an epoch may differ."""

    def __init__(self, **odd: Callable[[], Iterator[Any]]) -> None:
        self.calls = 0
        self.closed = 0
        self._odd = {int(name.removeprefix("epoch_")): source for name, source in odd.items()}

    def __call__(self) -> Iterator[Any]:
        self.calls += 1
        try:
            yield from self._odd.get(self.calls - 1, BATCHES)()
        finally:
            self.closed += 1


@pytest.fixture(params=[None, 3], ids=["epochs unknown", "epochs known"])
def open_reader(request: pytest.FixtureRequest, good: Teacher) -> Callable[[Callable[[], Any]], DistillReader]:
    """Return what makes a reader, which reads ahead into the next epoch or does not."""
    return lambda source: reader_of(source, Fixed((good.address,)), RuntimeSettings(), epochs=request.param)


Open = Callable[[Callable[[], Any]], DistillReader]


def test_each_epoch_calls_the_source_once(open_reader: Open) -> None:
    """And an epoch that does not come, never."""
    source = Epochs()
    with open_reader(source) as reader:
        for _ in range(3):
            BATCHES.check(list(reader))
    assert (source.calls, source.closed) == (3, 3)


def test_empty_epochs_are_not_read_without_end(good: Teacher) -> None:
    """However many are said to come, only some are read ahead of the script."""
    calls = []

    def empty() -> Iterator[Any]:
        calls.append(1)
        return iter(())

    with reader_of(empty, Fixed((good.address,)), RuntimeSettings(), epochs=1000) as reader:
        assert [list(reader) for _ in range(3)] == [[], [], []]
        assert 3 <= len(calls) <= 3 + MOST_AHEAD + 1
        assert [list(reader) for _ in range(20)] == [[]] * 20
        assert 23 <= len(calls) <= 23 + MOST_AHEAD + 1


def test_what_the_source_raises_comes_in_its_place(open_reader: Open) -> None:
    """After the batches before it, in its own epoch; those before and after are whole."""

    def broken() -> Iterator[Any]:
        yield from Batches(7)()
        raise OSError("disk gone")

    source = Epochs(epoch_1=broken)
    with open_reader(source) as reader:
        BATCHES.check(list(reader))
        seen: list[Any] = []
        with pytest.raises(OSError, match="disk gone"):
            seen.extend(reader)
        Batches(7).check(seen)
        BATCHES.check(list(reader))
    assert (source.calls, source.closed) == (3, 3)


def test_an_epoch_may_end_early(open_reader: Open) -> None:
    """It has what came, and the next is whole."""
    source = Epochs(epoch_0=Batches(5), epoch_1=Batches(0))
    with open_reader(source) as reader:
        Batches(5).check(list(reader))
        assert list(reader) == []
        BATCHES.check(list(reader))
    assert source.calls == 3


@pytest.mark.parametrize("taken", [1, BATCHES.count])
def test_a_left_epoch_does_not_touch_the_next(taken: int, open_reader: Open) -> None:
    """Left at its first batch, or at its last when the next may be under way: that begins with its own first."""
    source = Epochs()
    with open_reader(source) as reader:
        for _ in range(2):
            for number, _ in enumerate(reader, start=1):
                if number == taken:
                    break
        BATCHES.check(list(reader))
        assert source.calls == 3
    assert source.closed == 3


def test_a_hanging_source_is_waited_for_and_said(monkeypatch: pytest.MonkeyPatch, open_reader: Open) -> None:
    """How long it takes only the source knows; the log says that the student waits for it, and nothing is lost."""
    monkeypatch.setattr(patience, "TELL_EVERY_S", 0.1)
    go_on = threading.Event()

    def hanging() -> Iterator[Any]:
        for number, item in enumerate(BATCHES()):
            if number == 10:
                go_on.wait()
            yield item

    with open_reader(Epochs(epoch_0=hanging)) as reader, structlog.testing.capture_logs() as logs:
        threading.Timer(0.5, go_on.set).start()
        seen, longest_gap_s = read_epoch(reader, lambda: None)
        BATCHES.check(seen)
        assert 0.3 < longest_gap_s < 2.0
    waits = [entry["waited_s"] for entry in logs if entry["event"] == "source.awaited"]
    assert len(waits) >= 3
    assert waits == sorted(waits)


def test_closing_does_not_wait_for_a_hanging_source(open_reader: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for long; the log says so."""
    monkeypatch.setattr(engine, "CLOSE_LIMIT_S", 0.2)
    hangs, go_on = threading.Event(), threading.Event()

    def hanging() -> Iterator[Any]:
        yield from Batches(3)()
        hangs.set()
        go_on.wait()

    with structlog.testing.capture_logs() as logs:
        with open_reader(hanging) as reader:
            next(iter(reader))
            assert hangs.wait(10.0)
        assert "source.still_busy" in [entry["event"] for entry in logs]
    go_on.set()
    wait_until(lambda: not any(thread.name == "edl feeder" for thread in threading.enumerate()))
