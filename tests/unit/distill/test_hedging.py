"""What takes too long is asked of a second teacher: when there is one, of whom, and of nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.students.fake_readers import batches, numbers, reader_of
from support.teachers.fakes import FakeTeachers, arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill import hedging
from edl_runtime.distill.batches import Batch, Request
from edl_runtime.distill.dispatcher import Dispatcher
from edl_runtime.distill.epoch import Lane
from edl_runtime.distill.patience import Patience
from edl_runtime.distill.pool import LANES_A_TEACHER
from edl_runtime.distill.seams import Seams
from edl_runtime.protocol.tensors import Array


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What silent teachers wait for; a request is slow after a tenth of a second."""
    monkeypatch.setattr(hedging, "UNKNOWN_DELAY_S", 0.1)
    return threading.Event()


def test_who_comes_later_is_asked_what_others_do_not_answer(held: threading.Event) -> None:
    """With nothing else left to ask, a teacher that joins is given what a silent one has had for long."""

    def silent(x: Array) -> dict[str, Array]:
        held.wait()
        return arithmetic(x)

    teachers = FakeTeachers({"a:1": silent, "b:2": arithmetic})
    x, labels = next(batches())
    source = [(x[:4], labels[:4])] * LANES_A_TEACHER
    with reader_of(teachers, source, addresses=("a:1",)) as reader:
        seen: list[Any] = []
        student = threading.Thread(target=lambda: seen.extend(reader))
        student.start()
        wait_until(lambda: teachers.asked["a:1"] == LANES_A_TEACHER)
        wait_until(lambda: not reader._own_engine.pipeline._watching)
        reader._own_engine._pools[0].use(["a:1", "b:2"])
        student.join(60)
        held.set()
        assert numbers(seen) == [0, 0]
        assert reader.stats().hedges == LANES_A_TEACHER
        assert reader.stats().answered == {"b:2": LANES_A_TEACHER}


@pytest.fixture
def lanes() -> tuple[Lane, ...]:
    """One of each of three teachers."""
    return Lane("a:1"), Lane("b:2"), Lane("c:3")


@pytest.fixture
def dispatcher(lanes: Sequence[Lane]) -> Iterator[Dispatcher]:
    """One with these lanes, and without a pipeline, whose lock is held."""
    lock = threading.RLock()
    made = Dispatcher(Seams(lock, lambda: None, lambda _: False), Patience("all", wait_limit_s=9, request_limit_s=9))
    for lane in lanes:
        made.join(lane)
    with lock:
        yield made


@pytest.fixture
def asked(dispatcher: Dispatcher, lanes: Sequence[Lane]) -> Request:
    """What the first lane is asked."""
    request = Request(Batch((), [], items=[4], requests=[3]), 0, 0, {}, 4)
    dispatcher.add([request], time.monotonic())
    assert dispatcher.take(lanes[0]) is request
    return request


def test_nothing_is_hedged_while_nobody_waits_for_it_and_others_have_work(
    dispatcher: Dispatcher, lanes: Sequence[Lane], asked: Request
) -> None:
    """The other teachers do what is queued; once the script waits for the request, one of them is asked it, too."""
    queued = [Request(asked.batch, 0, index, {}, 4) for index in (1, 2)]
    dispatcher.add(queued, time.monotonic())
    dispatcher.hedge(time.monotonic() + 10)
    assert dispatcher.take(lanes[1]) is queued[0]
    asked.batch.awaited = True
    dispatcher.hedge(time.monotonic() + 10)
    assert dispatcher.take(lanes[2]) is asked
    assert dispatcher.hedges == 1


def test_what_nobody_took_in_time_may_be_hedged_again(
    dispatcher: Dispatcher, lanes: Sequence[Lane], asked: Request
) -> None:
    """A request whose teacher is lost before a second one was free is the next one's alone, until that is slow, too."""
    first, second, third = lanes
    dispatcher.hedge(time.monotonic() + 10)
    dispatcher.part(first)
    assert dispatcher.take(second) is asked
    assert (dispatcher.retries, dispatcher.hedges) == (1, 0)
    dispatcher.hedge(time.monotonic() + 20)
    assert dispatcher.take(third) is asked
    assert (dispatcher.retries, dispatcher.hedges) == (1, 1)
    dispatcher.hedge(time.monotonic() + 30)
    assert dispatcher._slow == []


def test_a_second_teacher_is_another_one(dispatcher: Dispatcher, lanes: Sequence[Lane], asked: Request) -> None:
    """A free connection to the slow teacher does not get what that is slow about, and no third teacher does."""
    _, second, third = lanes
    dispatcher.hedge(time.monotonic() + 10)
    assert dispatcher._next_for(Lane("a:1")) is None
    assert dispatcher._next_for(second) is asked
    dispatcher.hedge(time.monotonic() + 20)
    assert dispatcher._next_for(third) is None


def test_what_a_second_teacher_fails_is_hedged_anew(
    dispatcher: Dispatcher, lanes: Sequence[Lane], asked: Request
) -> None:
    """Else it stays with the slow one, which may never answer."""
    _, second, third = lanes
    dispatcher.hedge(time.monotonic() + 10)
    assert dispatcher.take(second) is asked
    dispatcher.part(second)
    assert dispatcher._next_for(third) is None
    dispatcher.hedge(time.monotonic() + 10)
    assert dispatcher._next_for(third) is asked
    assert (dispatcher.retries, dispatcher.hedges) == (0, 2)


def test_a_teacher_that_failed_a_request_may_be_its_second(
    dispatcher: Dispatcher, lanes: Sequence[Lane], asked: Request
) -> None:
    """It may be the only one that is left, and have been away for a moment only."""
    first, second, _ = lanes
    dispatcher.part(first)
    assert dispatcher.take(second) is asked
    dispatcher.join(first)
    dispatcher.hedge(time.monotonic() + 10)
    assert dispatcher._next_for(first) is asked


def test_a_budget_bounds_how_many_are_hedged() -> None:
    """A few at first; then one for ten answers and one a second, and never many at once."""
    budget = hedging.Hedging(now=0.0)
    assert [budget.spend(0.0) for _ in range(5)] == [True] * 4 + [False]
    for _ in range(11):
        budget.note(0.01)
    assert [budget.spend(0.0) for _ in range(2)] == [True, False]
    assert [budget.spend(1.0) for _ in range(2)] == [True, False]
    assert sum(budget.spend(1000.0) for _ in range(100)) == hedging.MOST_SAVED
