"""DistillReader against teachers that fail, or are not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.students.fake_readers import BATCHES, batches, failing, numbers, patiently, reader_of
from support.teachers.fakes import SIGNATURE, FakeTeachers, arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill import batches as batches_module
from edl_runtime.distill.pool import LANES_A_TEACHER
from edl_runtime.errors import InferenceError, NoTeacherError, ProtocolError
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings


@pytest.mark.parametrize(
    "error",
    [
        lambda: ConnectionResetError("gone"),
        lambda: TimeoutError("silent"),
        lambda: ProtocolError("garbage"),
        lambda: InferenceError("b:2", 503, "leaving", retryable=True),
    ],
)
def test_a_failing_teacher_s_requests_are_answered_by_another(error: Callable[[], BaseException]) -> None:
    """Nothing is lost, repeated or out of order when a teacher fails in the middle, whatever way."""
    with reader_of({"a:1": patiently, "b:2": failing(error, after=5)}) as reader:
        assert numbers(list(reader)) == list(range(BATCHES))
        assert reader.stats().answered["b:2"] == 5


def test_answers_of_the_wrong_shape_are_not_delivered() -> None:
    """A teacher that answers for other rows than it was asked about has failed."""

    def cut_short(x: Array) -> dict[str, Array]:
        return {"double": x[1:] * 2, "sum": x.sum(axis=1)}

    with reader_of({"a:1": patiently, "b:2": cut_short}) as reader:
        assert numbers(list(reader)) == list(range(BATCHES))
        assert "b:2" not in reader.stats().answered


def test_a_request_that_every_teacher_would_refuse_ends_the_epoch() -> None:
    """There is no point in asking the next teacher, so the training script gets the refusal at once."""
    refusal = InferenceError("a:1", 400, "what is this", retryable=False)
    teachers = FakeTeachers({"a:1": failing(lambda: refusal, after=4)})
    with reader_of(teachers) as reader:
        with pytest.raises(InferenceError) as caught:
            list(reader)
        assert caught.value is refusal
        teachers.behaviours["a:1"] = arithmetic
        assert numbers(list(reader)) == list(range(BATCHES))


def test_a_teacher_with_another_model_is_not_used() -> None:
    """The first teacher's model counts; one of another is left alone."""
    other = msgspec.structs.replace(SIGNATURE, versions=("2",))
    teachers = FakeTeachers({"a:1": patiently}, {"b:2": other})
    with reader_of(teachers, addresses=("a:1", "b:2")) as reader:
        assert numbers(list(reader)) == list(range(BATCHES))
        teachers.behaviours["b:2"] = arithmetic
        while "another model" not in reader._own_engine.pipeline.dispatchers[0]._patience.trouble:
            list(reader)
        list(reader)
    assert teachers.asked["b:2"] == 0


def test_without_a_teacher_the_wait_ends_with_an_error_that_says_why() -> None:
    """It names the teachers, how long it waited and what is wrong with them; the reader can be closed."""
    with reader_of({}, addresses=("a:1", "b:2"), wait_s=0.4) as reader:
        begin = time.monotonic()
        with pytest.raises(NoTeacherError, match=r"'a:1,b:2' after \d+ s \(.*nobody listens\)") as caught:
            list(reader)
        assert time.monotonic() - begin < 10
    assert caught.value.waited_s >= 0.4


def test_teachers_that_answer_nothing_but_nonsense_count_as_none() -> None:
    """Being connected is not enough: the wait for an answer ends as without a teacher."""
    reader = reader_of({"a:1": failing(lambda: ProtocolError("garbage"))}, wait_s=0.4)
    with reader, pytest.raises(NoTeacherError, match="garbage"):
        list(reader)


@pytest.mark.parametrize(
    "error", [InferenceError("a:1", 500, "the model failed", retryable=True), ProtocolError("garbage")]
)
@pytest.mark.parametrize("addresses", [("a:1",), ("a:1", "b:2", "c:3")])
def test_a_request_that_every_teacher_fails_ends_the_epoch(
    addresses: tuple[str, ...], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly it fails and whatever else is answered meanwhile, the script gets the failure; then all works."""
    monkeypatch.setattr(batches_module, "LEAST_FAILING_S", 0.2)

    def poisoned(x: Array) -> dict[str, Array]:
        if x[0, 0] == 5:
            time.sleep(0.05)
            raise error
        return arithmetic(x)

    teachers = FakeTeachers(dict.fromkeys(addresses, poisoned))
    with reader_of(teachers, wait_s=60) as reader:
        seen: list[Any] = []
        begin = time.monotonic()
        with pytest.raises(type(error)) as caught:
            seen.extend(reader)
        assert caught.value is error
        assert time.monotonic() - begin < 30
        teachers.behaviours.update(dict.fromkeys(addresses, arithmetic))
        assert numbers(list(reader)) == list(range(BATCHES))


def test_a_teacher_that_fails_everything_condemns_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often one teacher fails a request, it is another's to answer, even a slow one's."""
    monkeypatch.setattr(batches_module, "LEAST_FAILING_S", 0.1)

    def slowly(x: Array) -> dict[str, Array]:
        time.sleep(0.5)
        return arithmetic(x)

    few = [next(batches())]
    with reader_of({"a:1": failing(lambda: ProtocolError("garbage")), "b:2": slowly}, few) as reader:
        assert len(list(reader)) == len(few)


def test_teachers_that_are_connected_and_silent_are_not_waited_for_without_end() -> None:
    """Without any answer, the wait ends when it is over and a request could have timed out, whichever is later."""
    held = threading.Event()

    def silent(x: Array) -> dict[str, Array]:
        held.wait()
        return arithmetic(x)

    settings = RuntimeSettings(teacher_wait_s=0.2, teacher_timeout_s=0.4)
    with reader_of({"a:1": silent}, settings=settings) as reader:
        with pytest.raises(NoTeacherError) as caught:
            list(reader)
        assert 0.4 <= caught.value.waited_s < 10
        held.set()


def test_a_teacher_that_lets_requests_time_out_is_probed_ever_less_often() -> None:
    """Each timeout holds up what the teacher was asked, so it goes into quarantine, for longer each time."""
    teachers = FakeTeachers({"a:1": arithmetic, "b:2": failing(lambda: TimeoutError("silent"))})
    with reader_of(teachers) as reader:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert numbers(list(reader)) == list(range(BATCHES))
        assert "silent" in reader.stats().quarantined["b:2"]
    assert teachers.asked["b:2"] <= LANES_A_TEACHER + 4  # probed after 0.1, 0.3, 0.7 and 1.5 s


def test_one_teacher_s_refusal_is_not_believed_while_there_is_another() -> None:
    """A teacher that refuses good requests goes into quarantine, and another answers."""
    refusal = InferenceError("b:2", 400, "not like this", retryable=False)
    with reader_of({"a:1": patiently, "b:2": failing(lambda: refusal)}) as reader:
        assert numbers(list(reader)) == list(range(BATCHES))
        assert "not like this" in reader.stats().quarantined["b:2"]


def test_a_request_that_all_teachers_refuse_ends_the_epoch_soon() -> None:
    """Each is asked once."""
    teachers = FakeTeachers(
        {
            address: failing(lambda: InferenceError("", 400, "what is this", retryable=False))
            for address in ("a:1", "b:2", "c:3")
        }
    )
    with reader_of(teachers, [next(batches())]) as reader:
        begin = time.monotonic()
        with pytest.raises(InferenceError, match="what is this"):
            list(reader)
        assert time.monotonic() - begin < 2


def test_a_teacher_that_lies_by_one_connection_rests_with_all() -> None:
    """For longer each time, and what it answers right in between does not count."""

    def by_one(x: Array) -> dict[str, Array]:
        if threading.current_thread().name.endswith(f" {LANES_A_TEACHER - 1}"):
            raise ProtocolError("garbage")
        return patiently(x)

    teachers = FakeTeachers({"a:1": patiently, "b:2": by_one})
    with reader_of(teachers) as reader:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            assert numbers(list(reader)) == list(range(BATCHES))
    assert teachers.asked["b:2"] < teachers.asked["a:1"] / 4


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
        wait_until(lambda: teachers.asked["a:1"] == LANES_A_TEACHER)
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


def test_training_goes_on_when_a_teacher_returns() -> None:
    """All teachers gone in the middle is a pause, if one is back within the wait limit."""
    teachers = FakeTeachers({"a:1": patiently})
    with reader_of(teachers) as reader:
        seen = []
        for batch in reader:
            seen.append(batch)
            if len(seen) == 3:
                teachers.behaviours["a:1"] = failing(lambda: ConnectionResetError("gone"))
                threading.Timer(0.3, teachers.behaviours.update, [{"a:1": arithmetic}]).start()
        assert numbers(seen) == list(range(BATCHES))


def test_a_teacher_that_is_not_ready_yet_is_used_when_it_is() -> None:
    """A teacher that still loads is asked again until it is ready."""
    teachers = FakeTeachers({"a:1": arithmetic})
    teachers.not_ready.add("a:1")
    with reader_of(teachers) as reader:
        threading.Timer(0.2, teachers.not_ready.clear).start()
        assert numbers(list(reader)) == list(range(BATCHES))


def test_the_only_teacher_s_failures_are_waited_out() -> None:
    """One that fails whatever it is asked is waited for as one that is away, and goes on when it is good again."""
    teachers = FakeTeachers({"a:1": failing(lambda: InferenceError("a:1", 500, "broken", retryable=True), after=5)})
    with reader_of(teachers) as reader:
        seen = []
        for batch in reader:
            seen.append(batch)
            if len(seen) == 1:
                threading.Timer(3.0, teachers.behaviours.update, [{"a:1": arithmetic}]).start()
        assert numbers(seen) == list(range(BATCHES))
        assert teachers.asked["a:1"] > batches_module.MOST_FAILURES + 5
