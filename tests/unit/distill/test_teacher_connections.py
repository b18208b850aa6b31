"""When a teacher is left alone: what puts it into quarantine, what gets it out, and how long a connection waits."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support.teachers.fakes import SIGNATURE, Behaviour, FakeConnection, FakeTeachers, arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill.batching import MIN_FAILING_S, Batch, Request
from edl_runtime.distill.bindings import RequestPlan
from edl_runtime.distill.dispatch_policy import AnswerTimeout
from edl_runtime.distill.dispatcher import Dispatcher, PipelineSignals, WorkerSlot
from edl_runtime.distill.teacher_connections import (
    FIRST_QUARANTINE_S,
    FIRST_RECONNECT_S,
    LONGEST_RECONNECT_S,
    PROBATION,
    QUARANTINE_JITTER,
    TeacherHealth,
    TeacherWorker,
    WorkerContext,
)
from edl_runtime.errors import SpecError
from edl_runtime.protocol.errors import InferenceError
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.tensors import Array


class Waits(threading.Event):
    """Notes how long it is waited for, and lets nobody wait."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.lengths.append(timeout)
        return self.is_set()


@pytest.fixture
def dispatcher() -> Dispatcher:
    """One that has two requests."""
    lock = threading.RLock()
    made = Dispatcher(
        PipelineSignals(lock, lambda: None, lambda _: False), AnswerTimeout("all", wait_limit_s=9, request_limit_s=9)
    )
    batch = Batch((), [], items=[8], requests=[2])
    inputs = {"x": np.zeros((4, 4), np.float32)}
    with lock:
        made.enqueue([Request(batch, 0, index, inputs, 4) for index in range(2)], time.monotonic())
    return made


def lane_to(behaviour: Behaviour, dispatcher: Dispatcher, number: int) -> TeacherWorker:
    plan_of = partial(RequestPlan.of, ["x"], ["double"], {})

    def fail(error: BaseException) -> None:
        raise error

    asking = WorkerContext(dispatcher, FakeTeachers({"a:1": behaviour}).connect, plan_of, fail)
    return TeacherWorker(asking, TeacherHealth("a:1"), number)


def test_retries_of_a_busy_teacher_back_off(dispatcher: Dispatcher) -> None:
    """It is not bad, so it does not go into quarantine; after an answer the next wait is the first again."""
    busy = iter([*[True] * 6, False, True])
    worker: TeacherWorker

    def behaviour(x: Array) -> dict[str, Array]:
        assert not worker.health.reason
        is_busy = next(busy, None)
        if is_busy is None:
            worker.gone.set()
        if is_busy is not False:
            raise InferenceError("a:1", 503, "busy", retryable=True)
        return arithmetic(x)

    worker = lane_to(behaviour, dispatcher, 0)
    worker.gone = waits = Waits()
    worker.start()
    worker.join()
    doubled = [FIRST_RECONNECT_S * 2**times for times in range(4)]
    assert waits.lengths == [*doubled, LONGEST_RECONNECT_S, LONGEST_RECONNECT_S, FIRST_RECONNECT_S]


def test_a_server_that_tells_its_model_no_more_ends_no_training(dispatcher: Dispatcher) -> None:
    """Another has, and it may again. Where none has, the address is wrong, which is the script's error."""

    class Silent(FakeConnection):
        def signature(self) -> ModelSignature:
            raise SpecError("teacher a:1", "a model whose inputs its server does not tell", "an address that does")

    failures: list[BaseException] = []

    def tries() -> list[float | None]:
        context = WorkerContext(
            dispatcher, lambda address: Silent(FakeTeachers({address: arithmetic}), address), plan_of, failures.append
        )
        worker = TeacherWorker(context, TeacherHealth("a:1"), 0)

        class Once(Waits):
            def wait(self, timeout: float | None = None) -> bool:
                self.set()
                return super().wait(timeout)

        worker.gone = waits = Once()
        worker.start()
        worker.join()
        return waits.lengths

    plan_of = partial(RequestPlan.of, ["x"], ["double"], {})
    assert (tries(), [type(one) for one in failures]) == ([], [SpecError])
    dispatcher.agree_on_signature(SIGNATURE)
    assert (tries(), len(failures)) == ([FIRST_RECONNECT_S], 1)


def test_the_oldest_request_ends_the_epoch_when_a_teacher_fails_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that came back after it are not probed in its place: it fails at a probe after ten seconds."""
    now = [1000.0]
    for module in ("dispatcher", "teacher_connections"):
        monkeypatch.setattr(f"edl_runtime.distill.{module}.time", SimpleNamespace(monotonic=lambda: now[0]))
    asked: list[Array] = []
    asked_at = []

    def behaviour(x: Array) -> dict[str, Array]:
        asked.append(x)
        asked_at.append(now[0])
        raise failure

    class Rests(Waits):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0.0
            if oldest.failure is not None or len(asked) > 20:
                self.set()
            return super().wait(timeout)

    oldest = Batch((), [], items=[1], requests=[1])
    newest = Batch((), [], items=[2], requests=[1])
    oldest.turn, newest.turn = (0,), (1,)
    failure = InferenceError("a:1", 500, "the model failed", retryable=True)
    lock = threading.RLock()
    dispatcher = Dispatcher(
        PipelineSignals(lock, lambda: None, lambda _: False), AnswerTimeout("all", wait_limit_s=60, request_limit_s=30)
    )
    inputs = {batch: {"x": np.zeros((batch.samples, 4), np.float32)} for batch in (oldest, newest)}
    with lock:
        dispatcher.enqueue([Request(batch, 0, 0, x, batch.samples) for batch, x in inputs.items()], now[0])
    others = WorkerSlot("b:2"), WorkerSlot("b:2")
    for other in others:
        dispatcher.add_worker(other)
        dispatcher.take_request(other)
    for other in others:
        dispatcher.remove_worker(other)
    worker = lane_to(behaviour, dispatcher, 0)
    worker.gone = Rests()
    worker.start()
    worker.join()
    assert oldest.failure is not None
    assert (oldest.failure.__cause__, newest.failure) == (failure, None)
    assert {len(x) for x in asked} == {oldest.samples}
    assert MIN_FAILING_S <= asked_at[-1] - asked_at[0] <= 2 * MIN_FAILING_S


def test_a_wrong_answer_quarantines_all_connections_of_a_teacher(dispatcher: Dispatcher) -> None:
    """What another connection of it has taken meanwhile is not asked."""
    asked = []

    def behaviour(x: Array) -> dict[str, Array]:
        asked.append(x)
        worker.health.quarantine("garbage")
        return arithmetic(x)

    worker = lane_to(behaviour, dispatcher, 1)
    worker.start()
    wait_until(lambda: dispatcher.retries == 1)
    worker.leave()
    worker.join()
    assert (len(asked), dispatcher.queued) == (1, 1)


@pytest.fixture
def health() -> TeacherHealth:
    return TeacherHealth("a:1")


def probed(health: TeacherHealth, now: float) -> None:
    """Have it answer as it should once it has rested."""
    health.note_answer(sent_at=now + 60)


def test_only_a_probe_ends_a_quarantine(health: TeacherHealth) -> None:
    """Not the right answer to what another connection had asked before."""
    before = time.monotonic()
    health.quarantine("garbage")
    health.note_answer(sent_at=before)
    assert (health.reason, health.may_send.is_set()) == ("garbage", False)
    probed(health, time.monotonic())
    assert (health.reason, health.may_send.is_set()) == ("", True)


def test_one_that_misbehaves_again_and_again_rests_ever_longer(
    health: TeacherHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right answers in between don't help it, unless it has behaved for a time."""
    now = [1000.0]
    monkeypatch.setattr("edl_runtime.distill.teacher_connections.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("edl_runtime.distill.teacher_connections.QUARANTINE_JITTER", 1.0)
    rests = []
    for good_s in (0.0, 0.0, 0.0, PROBATION * 16 * FIRST_QUARANTINE_S):
        health.quarantine("garbage")
        rests.append(health.probe_due_in_s(now[0]))
        probed(health, now[0])
        now[0] += good_s
    health.quarantine("garbage")
    assert [*rests, health.probe_due_in_s(now[0])] == pytest.approx(
        [FIRST_QUARANTINE_S * times for times in (1, 2, 4, 8, 1)]
    )


def test_a_retired_teacher_wakes_its_workers(health: TeacherHealth) -> None:
    """Whatever is found out about it before or after."""
    health.quarantine("garbage")
    health.retire()
    assert health.may_send.is_set()
    late = TeacherHealth("b:2")
    late.retire()
    late.quarantine("garbage")
    assert late.may_send.is_set()


def test_no_two_rest_alike() -> None:
    """Else they would be probed together again and again, and each be asked what it was asked before."""
    ends = set()
    for _ in range(20):
        health = TeacherHealth("a:1")
        health.quarantine("garbage")
        ends.add(round(health.probe_due_in_s(time.monotonic()) / FIRST_QUARANTINE_S, 2))
    assert len(ends) > 2
    assert max(ends) <= QUARANTINE_JITTER
