"""DistillReader against teachers that fail, or are not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from support.students.fake_readers import BATCHES, batches, failing, never_hedge, numbers, patiently, reader_of
from support.teachers.fakes import SIGNATURE, FakeTeachers, arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill import batching as batches_module
from edl_runtime.distill.batching import MAX_FAILURES
from edl_runtime.distill.dispatch_policy import AnswerTimeout
from edl_runtime.distill.errors import DeadlyRequestError, NoTeacherError
from edl_runtime.distill.teacher_connections import WORKERS_PER_TEACHER
from edl_runtime.protocol.errors import InferenceError, ProtocolError
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings

ALL = list(range(BATCHES))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teachers that failed are tried again at once; no request is hedged or given up, however busy the machine is."""
    never_hedge(monkeypatch)
    monkeypatch.setattr(batches_module, "MIN_FAILING_S", 600.0)
    monkeypatch.setattr("edl_runtime.distill.teacher_connections.FIRST_QUARANTINE_S", 0.001)
    monkeypatch.setattr("edl_runtime.distill.teacher_connections.LONGEST_QUARANTINE_S", 0.01)
    monkeypatch.setattr("edl_runtime.distill.teacher_connections.FIRST_RECONNECT_S", 0.001)
    monkeypatch.setattr("edl_runtime.distill.teacher_connections.LONGEST_RECONNECT_S", 0.01)


def broken() -> InferenceError:
    return InferenceError("a:1", 500, "the model failed", retryable=True)


def refusal() -> InferenceError:
    return InferenceError("a:1", 400, "what is this", retryable=False)


def test_what_one_teacher_refuses_another_answers() -> None:
    """Nothing is lost, repeated or out of order; the one goes into quarantine."""
    refuse = failing(refusal, after=5)

    def refused(x: Array) -> dict[str, Array]:
        wait_until(lambda: teachers.asked["a:1"] > 0)  # what the only one that is connected refuses is wrong
        return refuse(x)

    teachers = FakeTeachers({"a:1": patiently, "b:2": refused})
    with reader_of(teachers) as reader:
        while "b:2" not in reader.stats().quarantined:
            assert numbers(list(reader)) == ALL
        assert "what is this" in reader.stats().quarantined["b:2"]
        assert reader.stats().answered["b:2"] == 5


def test_what_one_teacher_answers_with_nan_another_answers() -> None:
    """No NaN reaches the script, and the one goes into quarantine; unless the script takes them."""

    def nan(x: Array) -> dict[str, Array]:
        return {"double": x * np.nan, "sum": x.sum(axis=1)}

    with reader_of({"a:1": patiently, "b:2": nan}) as reader:
        while "b:2" not in reader.stats().quarantined:
            assert numbers(list(reader)) == ALL
        assert "allow_nan=True" in reader.stats().quarantined["b:2"]
    with reader_of({"b:2": nan}, allow_nan=True) as reader:
        assert all(np.isnan(double).all() for *_, double in reader)


@pytest.mark.parametrize("addresses", [("a:1",), ("a:1", "b:2", "c:3")])
def test_a_request_that_all_teachers_refuse_ends_the_epoch(addresses: tuple[str, ...]) -> None:
    """The training script gets the refusal, and there is no point in asking again; then all works."""
    teachers = FakeTeachers(dict.fromkeys(addresses, failing(refusal, after=4)))
    with reader_of(teachers) as reader:
        with pytest.raises(InferenceError, match="what is this"):
            list(reader)
        teachers.behaviours.update(dict.fromkeys(addresses, arithmetic))
        assert numbers(list(reader)) == ALL


def test_a_teacher_with_another_model_is_not_used() -> None:
    """The first teacher's model counts; one of another is left alone."""
    other = msgspec.structs.replace(SIGNATURE, versions=("2",))
    teachers = FakeTeachers({"a:1": patiently}, {"b:2": other})
    with reader_of(teachers, addresses=("a:1", "b:2")) as reader:
        assert numbers(list(reader)) == ALL
        teachers.behaviours["b:2"] = arithmetic
        while "model differs" not in reader._own_engine.pipeline.dispatchers[0].timeout.last_error:
            list(reader)
        list(reader)
    assert teachers.asked["b:2"] == 0


def end_no_wait_before(monkeypatch: pytest.MonkeyPatch, come_so_far: Callable[..., bool]) -> None:
    """Have the script wait until its workers have come so far, however slow the machine is."""
    pause_s = AnswerTimeout.pause_s

    def later(self: AnswerTimeout, now: float, **given: Any) -> float:
        return pause_s(self, now, **given) if come_so_far(self, **given) else 0.01

    monkeypatch.setattr(AnswerTimeout, "pause_s", later)


@pytest.mark.parametrize(
    ("behaviours", "whom_and_why"),
    [
        ({}, r"'a:1' after \d+ s \(.*nothing listens\)"),
        ({"a:1": failing(lambda: ProtocolError("garbage"))}, "garbage"),
    ],
)
def test_the_wait_without_a_correct_answer_ends_with_its_reason(
    behaviours: dict[str, Any], whom_and_why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the teachers, how long it waited and what is wrong with them. To be connected is not enough."""
    end_no_wait_before(monkeypatch, lambda patience, **_: bool(patience.last_error))
    with (
        reader_of(behaviours, wait_s=0.2) as reader,
        pytest.raises(NoTeacherError, match=whom_and_why) as caught,
    ):
        list(reader)
    assert caught.value.waited_s >= 0.2


def test_teachers_that_are_connected_and_silent_are_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without any answer, the wait ends when it is over and a request could have timed out, whichever is later."""
    end_no_wait_before(monkeypatch, lambda _, connected, **__: connected)
    held = threading.Event()

    def silent(x: Array) -> dict[str, Array]:
        held.wait()
        return arithmetic(x)

    settings = RuntimeSettings(teacher_wait_s=0.1, teacher_timeout_s=0.2)
    with reader_of({"a:1": silent}, settings=settings) as reader:
        with pytest.raises(NoTeacherError) as caught:
            list(reader)
        assert caught.value.waited_s >= 0.2
        held.set()


@pytest.mark.parametrize(
    ("addresses", "error"), [(("a:1",), broken()), (("a:1", "b:2", "c:3"), ProtocolError("garbage"))]
)
def test_a_request_that_every_teacher_fails_ends_the_epoch(
    addresses: tuple[str, ...], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly it fails and whatever else is answered meanwhile, the script gets the failure; then all works."""
    monkeypatch.setattr(batches_module, "MIN_FAILING_S", 0.1)

    def poisoned(x: Array) -> dict[str, Array]:
        if x[0, 0] == 5:
            time.sleep(0.01)
            raise error
        return arithmetic(x)

    teachers = FakeTeachers(dict.fromkeys(addresses, poisoned))
    with reader_of(teachers, wait_s=60) as reader:
        with pytest.raises(type(error)) as caught:
            list(reader)
        assert caught.value.__cause__ is error
        assert "batch 5 of the epoch: " in str(caught.value)
        assert any(address in str(caught.value) for address in addresses)
        teachers.behaviours.update(dict.fromkeys(addresses, arithmetic))
        assert numbers(list(reader)) == ALL


def test_a_teacher_that_fails_everything_condemns_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often one teacher fails a request, it is another's to answer, even a slow one's."""
    monkeypatch.setattr(batches_module, "MIN_FAILING_S", 0.0)

    def lie(_: Array) -> dict[str, Array]:
        wait_until(lambda: teachers.asked["b:2"] > 0)  # what all that are connected fail is given up
        raise ProtocolError("garbage")

    def slowly(x: Array) -> dict[str, Array]:
        wait_until(lambda: teachers.asked["a:1"] > 2 * MAX_FAILURES)
        return arithmetic(x)

    teachers = FakeTeachers({"a:1": lie, "b:2": slowly})
    with reader_of(teachers, [next(batches())]) as reader:
        assert numbers(list(reader)) == [0]


def test_a_short_absence_of_a_teacher_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the good one is away, what one that is left alone fails again and again waits: the good one may be back."""
    monkeypatch.setattr(batches_module, "MIN_FAILING_S", 0.0)
    teachers = FakeTeachers({"a:1": patiently, "b:2": patiently})

    def lie(_: Array) -> dict[str, Array]:
        if teachers.asked["b:2"] > asked + 2 * MAX_FAILURES:
            teachers.behaviours["a:1"] = arithmetic
            teachers.not_ready.clear()
        raise ProtocolError("garbage")

    with reader_of(teachers) as reader:
        while len(reader.stats().answered) < 2:
            assert numbers(list(reader)) == ALL
        asked = teachers.asked["b:2"]
        teachers.not_ready.add("a:1")
        teachers.behaviours.update({"a:1": failing(ConnectionResetError), "b:2": lie})
        assert numbers(list(reader)) == ALL


def test_only_the_first_answer_counts() -> None:
    """What a dismissed teacher answers after another did is neither delivered nor counted, and completes no batch."""
    late_may_answer, rest_may_be_answered = threading.Event(), threading.Event()

    def late(x: Array) -> dict[str, Array]:
        late_may_answer.wait()
        return {"double": x * 3, "sum": x.sum(axis=1)}

    def other(x: Array) -> dict[str, Array]:
        if len(x) < 4:  # the last request of a batch, which thus is not complete while the late answers come
            rest_may_be_answered.wait()
        return arithmetic(x)

    teachers = FakeTeachers({"a:1": late, "b:2": other})
    with reader_of(teachers, [next(batches())], addresses=("a:1",)) as reader:
        seen: list[Any] = []
        student = threading.Thread(target=lambda: seen.extend(reader))
        student.start()
        wait_until(lambda: teachers.asked["a:1"] == WORKERS_PER_TEACHER)
        reader._own_engine._pools[0].use(["b:2"])
        epoch = reader._own_engine.pipeline._reading
        assert epoch is not None
        wait_until(lambda: [batch.missing for batch in epoch.batches] == [1])
        late_may_answer.set()
        wait_until(lambda: not any("a:1" in thread.name for thread in threading.enumerate()))
        rest_may_be_answered.set()
        student.join()
        assert numbers(seen) == [0]
        assert reader.stats().answered == {"b:2": 3}


def test_a_request_that_kills_a_predictor_is_sent_once_more() -> None:
    """Alone; then the script gets an error that names it, and the other teachers of the pool live on."""

    def deadly(x: Array) -> dict[str, Array]:
        if x[0, 0] == 5 and len(x) < 4:  # the last of a batch's requests
            raise InferenceError("a:1", 503, "it died", retryable=True, predictor_died=True)
        return patiently(x)

    addresses = ("a:1", "b:2", "c:3", "d:4")
    teachers = FakeTeachers(dict.fromkeys(addresses, deadly))
    with reader_of(teachers) as reader:
        with pytest.raises(DeadlyRequestError, match=r"part 3 of 3 of batch 5 .*it died") as caught:
            list(reader)
        assert len(caught.value.teachers) == 2
        assert teachers.asked_alone.total() == 1
        assert reader.stats().retries == 1
        teachers.behaviours.update(dict.fromkeys(addresses, arithmetic))
        assert numbers(list(reader)) == ALL


@pytest.mark.parametrize("error", [lambda: ConnectionResetError("gone"), broken])
def test_the_only_teacher_s_failures_are_waited_out(error: Callable[[], BaseException]) -> None:
    """One that fails whatever it is asked is waited for as one that is away, and goes on when it is good again."""
    with reader_of({"a:1": failing(error, after=10, times=4 * MAX_FAILURES)}) as reader:
        assert numbers(list(reader)) == ALL
        assert reader.stats().retries >= 4 * MAX_FAILURES


def test_a_teacher_that_is_not_ready_yet_is_used_when_it_is() -> None:
    """A teacher that still loads is asked again until it is ready."""
    teachers = FakeTeachers({"a:1": arithmetic})
    teachers.not_ready.add("a:1")
    with reader_of(teachers) as reader:
        threading.Timer(0.05, teachers.not_ready.clear).start()
        assert numbers(list(reader)) == ALL
