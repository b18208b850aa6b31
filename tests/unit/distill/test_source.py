"""How a reader runs its source, what the source may do, and epochs that are left; one epoch ahead or not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
from support.students.fake_readers import BATCHES, ROWS, batches, numbers, patiently, reader_of
from support.teachers.fakes import SIGNATURE, Behaviour, FakeTeachers, arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill import DistillReader, batching, dispatch_policy, engine, pipeline
from edl_runtime.distill.dispatch_policy import DEFAULT_ROWS, MAX_ROWS, RequestSizing
from edl_runtime.distill.errors import DeadlyRequestError, SampleError
from edl_runtime.distill.pipeline import MAX_EPOCHS_AHEAD
from edl_runtime.protocol.errors import InferenceError, ProtocolError
from edl_runtime.protocol.oip import JOIN_EXTENSION, TensorSpec
from edl_runtime.protocol.tensors import Array

ALL = list(range(BATCHES))


class Epochs:
    """A source that counts how often it is called, and of which an epoch may differ."""

    def __init__(self, **odd: Callable[[], Iterator[Any]]) -> None:
        self.calls = 0
        self.closed = 0
        self._odd = {int(name.removeprefix("epoch_")): source for name, source in odd.items()}

    def __call__(self) -> Iterator[Any]:
        self.calls += 1
        try:
            yield from self._odd.get(self.calls - 1, batches)()
        finally:
            self.closed += 1


Open = Callable[[Callable[[], Any]], DistillReader]


@pytest.fixture(params=[None, 3], ids=["epochs unknown", "epochs known"])
def open_reader(request: pytest.FixtureRequest) -> Open:
    """Return what makes a reader, which reads ahead into the next epoch or does not."""
    return lambda source: reader_of({"a:1": patiently, "b:2": arithmetic}, source, epochs=request.param)


def few(count: int) -> Iterator[Any]:
    for _, batch in zip(range(count), batches(), strict=False):
        yield batch


def logged(logs: Any, event: str) -> bool:
    return event in [entry["event"] for entry in logs]


def test_each_epoch_calls_the_source_once(open_reader: Open) -> None:
    """And yields every batch once, in its order; an epoch that does not come never calls it."""
    source = Epochs()
    with open_reader(source) as reader:
        assert source.calls == 0
        for _ in range(3):
            assert numbers(list(reader)) == ALL
    assert (source.calls, source.closed) == (3, 3)


def test_empty_epochs_are_not_read_without_end() -> None:
    """However many are said to come, only some are read ahead of the script."""
    calls = []

    def empty() -> Iterator[Any]:
        calls.append(1)
        return iter(())

    with reader_of({"a:1": arithmetic}, empty, epochs=1000) as reader:
        for epochs in (3, 20):
            assert [list(reader) for _ in range(epochs)] == [[]] * epochs
            assert reader.stats().epoch < len(calls) <= reader.stats().epoch + MAX_EPOCHS_AHEAD + 2


def test_what_the_source_raises_comes_in_its_place(open_reader: Open) -> None:
    """The very exception, after the batches before it; epochs before and after are whole."""
    error = RuntimeError("disk full")

    def broken() -> Iterator[Any]:
        yield from few(7)
        raise error

    source = Epochs(epoch_1=broken)
    with open_reader(source) as reader:
        assert numbers(list(reader)) == ALL
        seen: list[Any] = []
        with pytest.raises(RuntimeError) as caught:
            seen.extend(reader)
        assert caught.value is error
        assert numbers(seen) == ALL[:7]
        assert numbers(list(reader)) == ALL
    assert (source.calls, source.closed) == (3, 3)


def test_an_epoch_may_end_early(open_reader: Open) -> None:
    """It has what came, and the next is whole."""
    source = Epochs(epoch_0=lambda: few(5), epoch_1=lambda: few(0))
    with open_reader(source) as reader:
        assert [numbers(list(reader)) for _ in range(3)] == [ALL[:5], [], ALL]
    assert source.calls == 3


@pytest.mark.parametrize("teachers", [{"a:1": arithmetic}, {}])
def test_an_empty_source_makes_an_empty_epoch(teachers: dict[str, Behaviour]) -> None:
    """Even without a teacher: nobody is asked."""
    with reader_of(teachers, list) as reader:
        assert list(reader) == []


@pytest.mark.parametrize("taken", [1, BATCHES])
def test_a_left_epoch_does_not_touch_the_next(taken: int, open_reader: Open) -> None:
    """Left at its first batch, or at its last when the next may be under way: that begins with its own first."""
    source = Epochs()
    with open_reader(source) as reader:
        for _ in range(2):
            for number, _ in enumerate(reader, start=1):
                if number == taken:
                    break
        assert numbers(list(reader)) == ALL
        assert source.calls == 3
    assert source.closed == 3


def test_the_source_is_never_run_twice_at_once() -> None:
    """An epoch waits for the source of one that was left in mid-read."""
    running, most = [0], [0]

    def source() -> Iterator[Any]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        try:
            for batch in batches():
                time.sleep(0.001)
                yield batch
        finally:
            time.sleep(0.02)
            running[0] -= 1

    with reader_of({"a:1": arithmetic}, source) as reader:
        for _ in range(3):
            for _ in reader:
                break
        assert numbers(list(reader)) == ALL
    assert most == [1]


def test_waiting_for_a_hanging_source_is_logged(monkeypatch: pytest.MonkeyPatch, open_reader: Open) -> None:
    """How long it takes only the source knows; the log says that the student waits for it, and nothing is lost."""
    monkeypatch.setattr(dispatch_policy, "LOG_WAIT_EVERY_S", 0.02)
    logs: list[Any]

    def grows() -> bool:
        waits = [entry["waited_s"] for entry in logs if entry["event"] == "source.awaited"]
        return len(waits) >= 3 and waits[-3] <= waits[-2] < waits[-1]

    def hanging() -> Iterator[Any]:
        for number, item in enumerate(batches()):
            if number == 10:
                wait_until(grows)
            yield item

    with open_reader(Epochs(epoch_0=hanging)) as reader, structlog.testing.capture_logs() as logs:
        assert numbers(list(reader)) == ALL


def test_waiting_for_a_source_that_still_runs_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that blocks when its epoch is left delays the next one."""
    monkeypatch.setattr(dispatch_policy, "LOG_WAIT_EVERY_S", 0.02)
    logs: list[Any]

    def source() -> Iterator[Any]:
        yield from batches()
        wait_until(lambda: logged(logs, "source.awaited"))

    with reader_of({"a:1": arithmetic}, source) as reader, structlog.testing.capture_logs() as logs:
        for number, _ in enumerate(reader, start=1):
            if number == BATCHES:
                break
        assert numbers(list(reader)) == ALL


def test_closing_does_not_wait_for_a_hanging_source(open_reader: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for long; the log says so."""
    monkeypatch.setattr(engine, "CLOSE_LIMIT_S", 0.05)
    hangs, go_on = threading.Event(), threading.Event()

    def hanging() -> Iterator[Any]:
        yield from few(3)
        hangs.set()
        go_on.wait()

    with structlog.testing.capture_logs() as logs:
        with open_reader(hanging) as reader:
            epoch = iter(reader)
            next(epoch)
            hangs.wait()
        assert logged(logs, "source.abandoned")
    go_on.set()
    wait_until(lambda: not any(thread.name == "edl feeder" for thread in threading.enumerate()))


@pytest.mark.parametrize("rows", [4, 0])
def test_the_source_runs_ahead_by_a_bounded_number_of_requests(rows: int) -> None:
    """While nothing is taken, a few requests for each teacher are all that is read, and items without rows count."""
    read: list[int] = []

    def source() -> Iterator[Any]:
        for number in range(1000):
            read.append(number)
            yield np.full((rows, 4), number, np.float32), np.arange(rows)

    with reader_of({"a:1": arithmetic, "b:2": arithmetic}, source) as reader:
        epoch = iter(reader)
        next(epoch)
        wait_until(lambda: len(read) >= 5)
        time.sleep(0.05)  # in which it would read on
    assert len(read) <= 16


def test_a_wrong_sample_is_raised_before_it_is_sent() -> None:
    """Batches before it are delivered, nobody is asked about it, and the reader can be closed."""

    def source() -> Iterator[Any]:
        yield np.zeros((4, 4), np.float32), np.arange(4)
        yield np.zeros((4, 4)), np.arange(4)

    teachers = FakeTeachers({"a:1": arithmetic})
    with reader_of(teachers, source) as reader:
        epoch = iter(reader)
        next(epoch)
        with pytest.raises(SampleError, match=r"'x' of batch 1: got float64 \[4\], the teachers take float32 \[4\]"):
            next(epoch)
    assert sum(teachers.asked.values()) == 1


def asked_much_at_once(
    monkeypatch: pytest.MonkeyPatch,
    teacher: Behaviour,
    source: Callable[[], Iterator[Any]],
    extensions: tuple[str, ...] = (JOIN_EXTENSION,),
    double: tuple[int, ...] = (-1, 4),
    **options: Any,
) -> tuple[DistillReader, FakeTeachers]:
    """A reader that asks one of our teachers about several items at once, and the teacher."""
    monkeypatch.setattr(batching, "ACCUMULATE_S", 60.0)
    monkeypatch.setattr(RequestSizing, "note", lambda *_: None)
    ours = msgspec.structs.replace(SIGNATURE, extensions=extensions)
    ours = msgspec.structs.replace(ours, outputs=(TensorSpec("double", "FP32", double), *ours.outputs[1:]))
    teachers = FakeTeachers({"a:1": teacher}, signatures={"a:1": ours})
    reader = reader_of(teachers, source, **{"teacher_batch_size": None, **options})
    reader._own_engine.pipeline.dispatchers[0]._sizing.rows = MAX_ROWS
    return reader, teachers


@pytest.fixture
def never_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script waits for a source that is slow on a busy machine, and has nothing asked about before."""
    monkeypatch.setattr(pipeline, "FLUSH_AFTER_S", 600.0)


@pytest.mark.usefixtures("never_flushed")
def test_joined_items_are_delivered_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher that answers at once is asked about as many items as make a large request; each counts as one."""
    reader, teachers = asked_much_at_once(monkeypatch, arithmetic, batches)
    with reader:
        assert numbers(list(reader)) == ALL
        assert numbers(list(reader)) == ALL
        stats = reader.stats()
    assert stats.batches == 2 * BATCHES
    assert sorted(teachers.rows) == [10, 10, 20, 40, 40, 80, 80, 160, 160]  # the very first is not held back


def test_large_items_are_requested_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is more than a request may have is not joined only to be cut."""
    monkeypatch.setattr(engine, "MAX_REQUEST_BYTES", 2 * ROWS * 16 - 1)
    reader, teachers = asked_much_at_once(monkeypatch, arithmetic, batches)
    with reader:
        list(reader)
        teachers.rows.clear()
        assert numbers(list(reader)) == ALL
    assert teachers.rows == [ROWS] * BATCHES


@pytest.mark.parametrize("options", [{"teacher_batch_size": ROWS}, {"extensions": ("top_k",)}, {"double": (-1, -1)}])
def test_batches_are_requested_alone(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """If a size is given, the teacher can't join requests, or its answers may be others for more rows."""
    reader, teachers = asked_much_at_once(monkeypatch, arithmetic, batches, **options)
    with reader:
        assert numbers(list(reader)) == ALL
    assert teachers.rows == [ROWS] * BATCHES


def test_a_wrong_item_among_others_is_named_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were to be asked about together with it are delivered before."""

    def source() -> Iterator[Any]:
        yield from batches()
        yield np.zeros((4, 4)), np.arange(4)

    reader, _ = asked_much_at_once(monkeypatch, arithmetic, source)
    with reader:
        epoch = iter(reader)
        assert numbers([next(epoch) for _ in ALL]) == ALL
        with pytest.raises(SampleError, match=f"'x' of batch {BATCHES}: got float64"):
            next(epoch)


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_source_may_wait_for_the_script(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """One that gives so many items and the next only when the script has trained on one: none is held back for ever."""
    room = threading.Semaphore(ahead)

    def source() -> Iterator[Any]:
        for batch in batches():
            room.acquire()
            yield batch

    reader, _ = asked_much_at_once(monkeypatch, arithmetic, source)
    with reader:
        found = []
        for item in reader:
            found.append(item)
            room.release()
    assert numbers(found) == ALL


def test_held_items_are_requested_beyond_the_window_while_the_source_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the script could make room, and it is the script that has what is held back asked about."""
    wait = threading.Event()

    def source() -> Iterator[Any]:
        for number in range(128):
            yield np.full((1, 4), number, np.float32), np.arange(1)
        wait.wait()

    reader, _ = asked_much_at_once(monkeypatch, arithmetic, source)
    with reader:
        epoch = iter(reader)
        assert numbers([next(epoch) for _ in range(128)]) == list(range(128))
        wait.set()
        assert list(epoch) == []


def test_what_is_wrong_while_the_source_waits_is_raised_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that came before is delivered, and the source is not waited for."""
    wait = threading.Event()

    def source() -> Iterator[Any]:
        yield from few(6)
        yield np.zeros((4, 4)), np.arange(4)
        yield from few(1)
        wait.wait()

    reader, _ = asked_much_at_once(monkeypatch, arithmetic, source)
    with reader:
        epoch = iter(reader)
        assert numbers([next(epoch) for _ in range(6)]) == ALL[:6]
        with pytest.raises(SampleError, match="'x' of batch 6: got float64"):
            next(epoch)
        wait.set()
        assert len(numbers([batch for _, batch in zip(range(6), reader, strict=False)])) == 6


REFUSED = InferenceError("a:1", 413, "too large", retryable=False)
FAILED = InferenceError("a:1", 500, "out of memory", retryable=True)
DIED = InferenceError("a:1", 503, "its predictor died", retryable=True, predictor_died=True)


@pytest.mark.usefixtures("never_flushed")
@pytest.mark.parametrize("failure", [REFUSED, FAILED, DIED, ProtocolError("NaN")])
@pytest.mark.parametrize("kind", ["batch", "sample_list", "sample"])
def test_a_request_too_large_for_a_model_is_split(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, kind: str
) -> None:
    """A training that works with the usual rows goes on with them, also where a single batch has more."""

    def short_of_memory(x: Array) -> dict[str, Array]:
        if len(x) > DEFAULT_ROWS:
            raise failure
        return arithmetic(x)

    def source() -> Iterator[Any]:
        yield from batches()
        yield np.full((2 * DEFAULT_ROWS, 4), BATCHES, np.float32), np.arange(2 * DEFAULT_ROWS)

    def samples() -> Iterator[Any]:
        for x, labels in source():
            rows = list(zip(x, labels, strict=True))
            yield from [rows] if kind == "sample_list" else rows

    whole = source if kind == "batch" else samples
    reader, teachers = asked_much_at_once(monkeypatch, short_of_memory, whole, format=kind)
    with reader:
        found = list(reader)
        if kind == "batch":
            assert numbers(found) == [*ALL, BATCHES]
        else:
            rows = [sample for item in found for sample in item] if kind == "sample_list" else found
            assert [int(x[0]) for x, _, _ in rows] == [int(x[0]) for batch, _ in source() for x in batch]
            assert all((double == x * 2).all() for x, _, double in rows)
        assert reader._own_engine.pipeline.most_rows == DEFAULT_ROWS
        assert reader.stats().samples == BATCHES * ROWS + 2 * DEFAULT_ROWS
        if failure in (REFUSED, FAILED):
            assert sum(teachers.asked.values()) <= BATCHES + 10
            assert not reader._own_engine._pools[0].quarantined()


@pytest.mark.usefixtures("never_flushed")
@pytest.mark.parametrize(
    ("failure", "told"),
    [(REFUSED, InferenceError), (DIED, DeadlyRequestError)],
)
def test_the_wrong_one_of_joined_batches_is_named(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, told: type[Exception]
) -> None:
    """Those before it are delivered; and no more predictors die than under a batch that is asked about alone."""
    deaths = []

    def picky(x: Array) -> dict[str, Array]:
        if (x == 20).any():
            deaths.append(len(x))
            raise failure
        return arithmetic(x)

    reader, _ = asked_much_at_once(monkeypatch, picky, batches)
    with reader:
        epoch = iter(reader)
        assert numbers([next(epoch) for _ in range(20)]) == ALL[:20]
        with pytest.raises(told, match="batch 20 of the epoch"):
            next(epoch)
    assert len(deaths) == 2
    assert deaths[0] > deaths[1] == ROWS
