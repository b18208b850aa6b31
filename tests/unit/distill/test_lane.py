"""When a teacher is left alone: what puts it into quarantine, what gets it out, and how long a connection waits."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support.teachers.fakes import Behaviour, FakeTeachers, arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill.batches import LEAST_FAILING_S, Batch, Request
from edl_runtime.distill.dispatcher import Dispatcher
from edl_runtime.distill.epoch import Lane
from edl_runtime.distill.feeds import Plan
from edl_runtime.distill.health import FIRST_REST_S, JITTER, PROBATION, Health
from edl_runtime.distill.lane import FIRST_RETRY_S, LAST_RETRY_S, Asking, LaneThread
from edl_runtime.distill.patience import Patience
from edl_runtime.distill.seams import Seams
from edl_runtime.errors import InferenceError
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
    made = Dispatcher(Seams(lock, lambda: None, lambda _: False), Patience("all", wait_limit_s=9, request_limit_s=9))
    batch = Batch((), [], items=[8], requests=[2])
    inputs = {"x": np.zeros((4, 4), np.float32)}
    with lock:
        made.add([Request(batch, 0, index, inputs, 4) for index in range(2)], time.monotonic())
    return made


def lane_to(behaviour: Behaviour, dispatcher: Dispatcher, number: int) -> LaneThread:
    plan_of = partial(Plan.of, ["x"], ["double"], {})

    def fail(error: BaseException) -> None:
        raise error

    asking = Asking(dispatcher, FakeTeachers({"a:1": behaviour}).connect, plan_of, fail)
    return LaneThread(asking, Health("a:1"), number)


def test_a_busy_teacher_is_asked_ever_less_often_until_it_answers(dispatcher: Dispatcher) -> None:
    """It is not bad, so it does not go into quarantine; after an answer the next wait is the first again."""
    busy = iter([*[True] * 6, False, True])
    lane: LaneThread

    def behaviour(x: Array) -> dict[str, Array]:
        assert not lane.health.reason
        is_busy = next(busy, None)
        if is_busy is None:
            lane.gone.set()
        if is_busy is not False:
            raise InferenceError("a:1", 503, "busy", retryable=True)
        return arithmetic(x)

    lane = lane_to(behaviour, dispatcher, 0)
    lane.gone = waits = Waits()
    lane.start()
    lane.join()
    doubled = [FIRST_RETRY_S * 2**times for times in range(4)]
    assert waits.lengths == [*doubled, LAST_RETRY_S, LAST_RETRY_S, FIRST_RETRY_S]


def test_the_oldest_request_ends_the_epoch_when_a_teacher_fails_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that came back after it are not probed in its place: it fails at a probe after ten seconds."""
    now = [1000.0]
    for module in ("dispatcher", "health", "lane"):
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
        Seams(lock, lambda: None, lambda _: False), Patience("all", wait_limit_s=60, request_limit_s=30)
    )
    inputs = {batch: {"x": np.zeros((batch.samples, 4), np.float32)} for batch in (oldest, newest)}
    with lock:
        dispatcher.add([Request(batch, 0, 0, x, batch.samples) for batch, x in inputs.items()], now[0])
    others = Lane("b:2"), Lane("b:2")
    for other in others:
        dispatcher.join(other)
        dispatcher.take(other)
    for other in others:
        dispatcher.part(other)
    lane = lane_to(behaviour, dispatcher, 0)
    lane.gone = Rests()
    lane.start()
    lane.join()
    assert oldest.failure is not None
    assert (oldest.failure.__cause__, newest.failure) == (failure, None)
    assert {len(x) for x in asked} == {oldest.samples}
    assert LEAST_FAILING_S <= asked_at[-1] - asked_at[0] <= 2 * LEAST_FAILING_S


def test_a_teacher_that_lies_by_one_connection_rests_with_all(dispatcher: Dispatcher) -> None:
    """What another connection of it has taken meanwhile is not asked."""
    asked = []

    def behaviour(x: Array) -> dict[str, Array]:
        asked.append(x)
        lane.health.misbehaved("garbage")
        return arithmetic(x)

    lane = lane_to(behaviour, dispatcher, 1)
    lane.start()
    wait_until(lambda: dispatcher.retries == 1)
    lane.leave()
    lane.join()
    assert (len(asked), dispatcher.queued) == (1, 1)


@pytest.fixture
def health() -> Health:
    return Health("a:1")


def probed(health: Health, now: float) -> None:
    """Have it answer as it should once it has rested."""
    health.answered(asked_at=now + 60)


def test_only_a_probe_ends_a_quarantine(health: Health) -> None:
    """Not the right answer to what another connection had asked before."""
    before = time.monotonic()
    health.misbehaved("garbage")
    health.answered(asked_at=before)
    assert (health.reason, health.out.is_set()) == ("garbage", False)
    probed(health, time.monotonic())
    assert (health.reason, health.out.is_set()) == ("", True)


def test_one_that_misbehaves_again_and_again_rests_ever_longer(health: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right answers in between don't help it, unless it has behaved for a time."""
    now = [1000.0]
    monkeypatch.setattr("edl_runtime.distill.health.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("edl_runtime.distill.health.JITTER", 1.0)
    rests = []
    for good_s in (0.0, 0.0, 0.0, PROBATION * 16 * FIRST_REST_S):
        health.misbehaved("garbage")
        rests.append(health.due_in_s(now[0]))
        probed(health, now[0])
        now[0] += good_s
    health.misbehaved("garbage")
    assert [*rests, health.due_in_s(now[0])] == pytest.approx([FIRST_REST_S * times for times in (1, 2, 4, 8, 1)])


def test_nobody_waits_for_one_that_is_not_in_use(health: Health) -> None:
    """Whatever is found out about it before or after."""
    health.misbehaved("garbage")
    health.retire()
    assert health.out.is_set()
    late = Health("b:2")
    late.retire()
    late.misbehaved("garbage")
    assert late.out.is_set()


def test_no_two_rest_alike() -> None:
    """Else they would be probed together again and again, and each be asked what it was asked before."""
    ends = set()
    for _ in range(20):
        health = Health("a:1")
        health.misbehaved("garbage")
        ends.add(round(health.due_in_s(time.monotonic()) / FIRST_REST_S, 2))
    assert len(ends) > 2
    assert max(ends) <= JITTER
