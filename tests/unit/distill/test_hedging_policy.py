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

from edl_runtime.distill import dispatch_policy
from edl_runtime.distill.batching import Batch, Request
from edl_runtime.distill.dispatch_policy import AnswerTimeout
from edl_runtime.distill.dispatcher import Dispatcher, PipelineSignals, WorkerSlot
from edl_runtime.distill.teacher_connections import WORKERS_PER_TEACHER
from edl_runtime.protocol.tensors import Array


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What silent teachers wait for; a request is slow after a tenth of a second."""
    monkeypatch.setattr(dispatch_policy, "FIRST_HEDGE_DELAY_S", 0.1)
    return threading.Event()


def test_a_later_teacher_gets_requests_that_others_do_not_answer(held: threading.Event) -> None:
    """With nothing else left to ask, a teacher that joins is given what a silent one has had for long."""

    def silent(x: Array) -> dict[str, Array]:
        held.wait()
        return arithmetic(x)

    teachers = FakeTeachers({"a:1": silent, "b:2": arithmetic})
    x, labels = next(batches())
    source = [(x[:4], labels[:4])] * WORKERS_PER_TEACHER
    with reader_of(teachers, source, addresses=("a:1",)) as reader:
        seen: list[Any] = []
        student = threading.Thread(target=lambda: seen.extend(reader))
        student.start()
        wait_until(lambda: teachers.asked["a:1"] == WORKERS_PER_TEACHER)
        wait_until(lambda: not reader._own_engine.pipeline._watching)
        reader._own_engine._pools[0].use(["a:1", "b:2"])
        student.join(60)
        held.set()
        assert numbers(seen) == [0, 0]
        assert reader.stats().hedges == WORKERS_PER_TEACHER
        assert reader.stats().answered == {"b:2": WORKERS_PER_TEACHER}


@pytest.fixture
def workers() -> tuple[WorkerSlot, ...]:
    """One of each of three teachers."""
    return WorkerSlot("a:1"), WorkerSlot("b:2"), WorkerSlot("c:3")


@pytest.fixture
def dispatcher(workers: Sequence[WorkerSlot]) -> Iterator[Dispatcher]:
    """One with these workers, and without a pipeline, whose lock is held."""
    lock = threading.RLock()
    made = Dispatcher(
        PipelineSignals(lock, lambda: None, lambda _: False), AnswerTimeout("all", wait_limit_s=9, request_limit_s=9)
    )
    for worker in workers:
        made.add_worker(worker)
    with lock:
        yield made


@pytest.fixture
def asked(dispatcher: Dispatcher, workers: Sequence[WorkerSlot]) -> Request:
    """What the first worker is asked."""
    request = Request(Batch((), [], items=[4], requests=[3]), 0, 0, {}, 4)
    dispatcher.enqueue([request], time.monotonic())
    assert dispatcher.take_request(workers[0]) is request
    return request


def test_nothing_is_hedged_while_no_script_waits_and_teachers_are_busy(
    dispatcher: Dispatcher, workers: Sequence[WorkerSlot], asked: Request
) -> None:
    """The other teachers do what is queued; once the script waits for the request, one of them is asked it, too."""
    queued = [Request(asked.batch, 0, index, {}, 4) for index in (1, 2)]
    dispatcher.enqueue(queued, time.monotonic())
    dispatcher.hedge(time.monotonic() + 10)
    assert dispatcher.take_request(workers[1]) is queued[0]
    asked.batch.awaited = True
    dispatcher.hedge(time.monotonic() + 10)
    assert dispatcher.take_request(workers[2]) is asked
    assert dispatcher.hedges == 1


def test_a_hedge_that_no_teacher_took_may_be_repeated(
    dispatcher: Dispatcher, workers: Sequence[WorkerSlot], asked: Request
) -> None:
    """A request whose teacher is lost before a second one was free is the next one's alone, until that is slow, too."""
    first, second, third = workers
    dispatcher.hedge(time.monotonic() + 10)
    dispatcher.remove_worker(first)
    assert dispatcher.take_request(second) is asked
    assert (dispatcher.retries, dispatcher.hedges) == (1, 0)
    dispatcher.hedge(time.monotonic() + 20)
    assert dispatcher.take_request(third) is asked
    assert (dispatcher.retries, dispatcher.hedges) == (1, 1)
    dispatcher.hedge(time.monotonic() + 30)
    assert dispatcher._to_hedge == []


def test_a_second_teacher_is_another_one(dispatcher: Dispatcher, workers: Sequence[WorkerSlot], asked: Request) -> None:
    """A free connection to the slow teacher does not get what that is slow about, and no third teacher does."""
    _, second, third = workers
    dispatcher.hedge(time.monotonic() + 10)
    assert dispatcher._next_request(WorkerSlot("a:1")) is None
    assert dispatcher._next_request(second) is asked
    dispatcher.hedge(time.monotonic() + 20)
    assert dispatcher._next_request(third) is None


def test_a_failed_hedge_is_hedged_again(dispatcher: Dispatcher, workers: Sequence[WorkerSlot], asked: Request) -> None:
    """Else it stays with the slow one, which may never answer."""
    _, second, third = workers
    dispatcher.hedge(time.monotonic() + 10)
    assert dispatcher.take_request(second) is asked
    dispatcher.remove_worker(second)
    assert dispatcher._next_request(third) is None
    dispatcher.hedge(time.monotonic() + 10)
    assert dispatcher._next_request(third) is asked
    assert (dispatcher.retries, dispatcher.hedges) == (0, 2)


def test_a_teacher_that_failed_a_request_may_be_its_second(
    dispatcher: Dispatcher, workers: Sequence[WorkerSlot], asked: Request
) -> None:
    """It may be the only one that is left, and have been away for a moment only."""
    first, second, _ = workers
    dispatcher.remove_worker(first)
    assert dispatcher.take_request(second) is asked
    dispatcher.add_worker(first)
    dispatcher.hedge(time.monotonic() + 10)
    assert dispatcher._next_request(first) is asked


def test_a_budget_bounds_how_many_are_hedged() -> None:
    """A few at first; then one for ten answers and one a second, and never many at once."""
    budget = dispatch_policy.HedgingPolicy(now=0.0)
    assert [budget.spend(0.0) for _ in range(5)] == [True] * 4 + [False]
    for _ in range(11):
        budget.note(0.01)
    assert [budget.spend(0.0) for _ in range(2)] == [True, False]
    assert [budget.spend(1.0) for _ in range(2)] == [True, False]
    assert sum(budget.spend(1000.0) for _ in range(100)) == dispatch_policy.MAX_SAVED_HEDGES
