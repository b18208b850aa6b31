"""In which order requests are asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from edl_runtime.distill.batching import Batch, Request
from edl_runtime.distill.dispatch_policy import AnswerTimeout
from edl_runtime.distill.dispatcher import Dispatcher, PipelineSignals, WorkerSlot
from edl_runtime.protocol.errors import InferenceError


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    """One without a pipeline, whose lock is held."""
    lock = threading.RLock()
    with lock:
        yield Dispatcher(
            PipelineSignals(lock, lambda: None, lambda _: False),
            AnswerTimeout("all", wait_limit_s=9, request_limit_s=9),
        )


@pytest.fixture
def requests(dispatcher: Dispatcher) -> Sequence[Request]:
    """One for each of five batches."""
    made = [Request(Batch((), [], items=[4], requests=[1]), 0, 0, {}, 4) for _ in range(5)]
    for number, request in enumerate(made):
        request.batch.turn = (number,)
    dispatcher.enqueue(made, time.monotonic())
    return made


def asked(dispatcher: Dispatcher, address: str) -> WorkerSlot:
    """A worker that has taken a request."""
    worker = WorkerSlot(address)
    dispatcher.add_worker(worker)
    assert dispatcher.take_request(worker) is not None
    return worker


def test_returned_requests_are_sent_first_and_oldest_first(dispatcher: Dispatcher, requests: Sequence[Request]) -> None:
    """The script waits for the oldest, whether teachers have failed or are not to be used any more."""
    workers = [asked(dispatcher, f"{name}:1") for name in "abcd"]
    dispatcher.remove_worker(workers[1])
    dispatcher.dismiss_workers([workers[0], workers[3]])
    dispatcher.remove_worker(workers[2])
    free = WorkerSlot("free:1")
    assert [dispatcher.take_request(free) for _ in requests] == requests
    assert dispatcher.retries == 4


def test_returned_requests_are_sent_before_later_slow_ones(dispatcher: Dispatcher, requests: Sequence[Request]) -> None:
    """A second teacher takes what it is hedged with in its turn, too; whatever became slow first."""
    now = time.monotonic()
    first, second, third = (asked(dispatcher, f"{name}:1") for name in "abc")
    third.sent_at -= 10
    for request in requests:
        request.batch.awaited = True
    dispatcher.hedge(now)
    second.sent_at -= 10
    dispatcher.hedge(now)
    dispatcher.remove_worker(first)
    free = WorkerSlot("free:1")
    assert [dispatcher.take_request(free) for _ in requests] == requests
    assert (dispatcher.retries, dispatcher.hedges) == (1, 2)


def test_a_request_that_killed_a_predictor_is_not_hedged(dispatcher: Dispatcher, requests: Sequence[Request]) -> None:
    """It may end that teacher's, too: one is asked, and if that lives, however slowly, no other."""
    first, other = (asked(dispatcher, f"{name}:1") for name in "ab")
    dispatcher.fail_request(first, InferenceError("a:1", 503, "it died", retryable=True, predictor_died=True))
    dispatcher.remove_worker(first)
    third = asked(dispatcher, "c:1")
    assert third.request is requests[0]
    third.sent_at = other.sent_at = time.monotonic() - 10
    for request in requests:
        request.batch.awaited = True
    dispatcher.hedge(time.monotonic())
    assert dispatcher._to_hedge == [requests[1]]
