"""DistillReader against teachers that are told how to behave."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
from fake_teachers import SIGNATURE, Behaviour, FakeTeachers, arithmetic
from teacher_process import wait_until

from edl_runtime.distill import Discovered, DistillReader, Fixed, JobReporter, engine
from edl_runtime.distill import batches as batches_module
from edl_runtime.distill.pool import LANES_A_TEACHER
from edl_runtime.errors import DistillError, InferenceError, NoTeacherError, ProtocolError, SampleError, SpecError
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings

BATCHES = 30
ROWS = 10


def batches() -> Iterator[tuple[Array, Array]]:
    """Batches that can be told apart: every value of the n-th is n."""
    for number in range(BATCHES):
        yield np.full((ROWS, 4), number, np.float32), np.arange(ROWS)


def reader_of(
    behaviours: dict[str, Behaviour] | FakeTeachers,
    source: Any = batches,
    *,
    wait_s: float = 5.0,
    **options: Any,
) -> DistillReader:
    teachers = behaviours if isinstance(behaviours, FakeTeachers) else FakeTeachers(behaviours)
    addresses = options.pop("addresses", tuple(teachers.behaviours) or ("a:1",))
    settings = options.pop("settings", RuntimeSettings(teacher_wait_s=wait_s))
    return DistillReader(
        source,
        inputs=["x", "label"],
        outputs=["double"],
        teachers=Fixed(addresses),
        teacher_batch_size=4,
        settings=settings,
        connect=teachers.connect,
        **options,
    )


def numbers(epoch: list[Any]) -> list[int]:
    """The batches' numbers; their answers are checked on the way."""
    for x, _, double in epoch:
        np.testing.assert_array_equal(double, x * 2)
    return [int(x[0, 0]) for x, *_ in epoch]


def patiently(x: Array) -> dict[str, Array]:
    time.sleep(0.002)
    return arithmetic(x)


def failing(error: Callable[[], BaseException], *, after: int = 0) -> Behaviour:
    """A behaviour that raises for every request after the first `after`."""
    seen = iter(range(10**6))

    def behaviour(x: Array) -> dict[str, Array]:
        if next(seen) >= after:
            raise error()
        return patiently(x)

    return behaviour


def test_epochs_are_in_order_and_whole() -> None:
    """Each epoch calls the source once and yields every batch once, in its order, however many teachers answer."""
    calls = []

    def source() -> Iterator[tuple[Array, Array]]:
        calls.append(threading.current_thread())
        return batches()

    with reader_of({"a:1": patiently, "b:2": arithmetic, "c:3": patiently}, source) as reader:
        assert calls == []
        for epoch in range(3):
            assert numbers(list(reader)) == list(range(BATCHES))
            assert len(calls) == epoch + 1
        stats = reader.stats()
    assert (stats.batches, stats.samples, stats.epoch) == (3 * BATCHES, 3 * BATCHES * ROWS, 2)
    assert sum(stats.answered.values()) == 3 * BATCHES * 3
    assert reader.stats().teachers == 0


def test_a_request_has_samples_of_one_batch_only() -> None:
    """The last request of a batch is smaller, so that a batch waits for nothing but its own samples."""
    teachers = FakeTeachers({"a:1": arithmetic})
    with reader_of(teachers) as reader:
        list(reader)
    assert sorted(teachers.rows) == sorted([4, 4, 2] * BATCHES)


def test_the_source_runs_ahead_by_a_bounded_number_of_requests() -> None:
    """While nothing is taken, a few requests for each teacher are all that is read from the source."""
    read: list[int] = []

    def source() -> Iterator[Any]:
        for number in range(1000):
            read.append(number)
            yield np.full((4, 4), number, np.float32), np.arange(4)

    with reader_of({"a:1": arithmetic, "b:2": arithmetic}, source) as reader:
        for _ in reader:
            wait_until(lambda: len(read) >= 10)
            break
    assert len(read) <= 16


def test_leaving_an_epoch_does_not_touch_the_next() -> None:
    """After a break the source's generator is closed and the next epoch starts at its first batch."""
    closed = []

    def source() -> Iterator[Any]:
        try:
            yield from batches()
        finally:
            closed.append(True)

    with reader_of({"a:1": patiently, "b:2": patiently}, source) as reader:
        for taken in (1, 5):
            for number, _ in enumerate(reader, start=1):
                if number == taken:
                    break
        assert numbers(list(reader)) == list(range(BATCHES))
    assert closed == [True] * 3


def test_of_two_iterations_the_later_goes_on() -> None:
    """An iteration that was started before says so instead of mixing epochs."""
    with reader_of({"a:1": arithmetic}) as reader:
        earlier = iter(reader)
        next(earlier)
        later = iter(reader)
        assert int(next(later)[0][0, 0]) == 0
        with pytest.raises(DistillError, match="one iteration at a time"):
            next(earlier)
        assert numbers(list(later)) == list(range(1, BATCHES))


def test_what_the_source_raises_is_raised_in_its_place() -> None:
    """The very exception comes after the batches before it, and the next epoch works."""
    error = RuntimeError("disk full")
    broken = [True]

    def source() -> Iterator[Any]:
        for number, batch in enumerate(batches()):
            if number == 7 and broken:
                raise error
            yield batch

    with reader_of({"a:1": patiently}, source) as reader:
        epoch = iter(reader)
        assert numbers([next(epoch) for _ in range(7)]) == list(range(7))
        with pytest.raises(RuntimeError) as caught:
            next(epoch)
        assert caught.value is error
        broken.clear()
        assert numbers(list(reader)) == list(range(BATCHES))


@pytest.mark.parametrize("teachers", [{"a:1": arithmetic}, {}])
def test_an_empty_source_makes_an_empty_epoch(teachers: dict[str, Behaviour]) -> None:
    """Even without a teacher: nobody is asked."""
    with reader_of(teachers, list) as reader:
        assert list(reader) == []


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
        while "another model" not in reader._engine.pipeline._patience.trouble:
            list(reader)
        list(reader)
    assert teachers.asked["b:2"] == 0


def test_without_a_teacher_the_wait_ends_with_an_error_that_says_why() -> None:
    """It names the teachers, how long it waited and what is wrong with them; the reader can be closed."""
    with reader_of({}, addresses=("a:1", "b:2"), wait_s=0.4) as reader:
        begin = time.monotonic()
        with pytest.raises(NoTeacherError, match=r"'a:1,b:2' after 0 s \(.*nobody listens\)") as caught:
            list(reader)
        assert time.monotonic() - begin < 2
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
        assert time.monotonic() - begin < 5
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
        assert 0.4 <= caught.value.waited_s < 2
        held.set()


def test_a_teacher_that_lets_requests_time_out_is_left_alone_for_a_while() -> None:
    """Each timeout costs the student the whole time limit, so such a teacher is not asked again at once."""
    teachers = FakeTeachers({"a:1": arithmetic, "b:2": failing(lambda: TimeoutError("silent"))})
    with reader_of(teachers) as reader:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert numbers(list(reader)) == list(range(BATCHES))
    assert teachers.asked["b:2"] <= LANES_A_TEACHER


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
        reader._engine._pool.use(["b:2"])
        epoch = reader._engine.pipeline._epoch
        assert epoch is not None
        wait_until(lambda: [batch.missing for batch in epoch.batches] == [1])
        late_may_answer.set()
        wait_until(lambda: not any("a:1" in thread.name for thread in threading.enumerate()))
        rest_may_be_answered.set()
        student.join()
        assert numbers(seen) == [0]
        assert reader.stats().answered == {"b:2": 3}


def test_only_answers_in_delivered_batches_are_counted() -> None:
    """Epochs that are left early count what was taken, however much was asked ahead."""
    with reader_of({"a:1": arithmetic, "b:2": patiently}) as reader:
        for _ in range(5):
            for _ in reader:
                break
        stats = reader.stats()
    assert (stats.batches, sum(stats.answered.values())) == (5, 5 * 3)


def test_the_source_is_never_run_twice_at_once() -> None:
    """An epoch waits for the source of one that was left in mid-read, and says so."""
    running, most = [0], [0]

    def source() -> Iterator[Any]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        try:
            for batch in batches():
                time.sleep(0.005)
                yield batch
        finally:
            time.sleep(0.05)
            running[0] -= 1

    with reader_of({"a:1": arithmetic}, source) as reader:
        for _ in range(3):
            for _ in reader:
                break
        assert numbers(list(reader)) == list(range(BATCHES))
    assert most == [1]


def test_waiting_for_a_busy_source_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that blocks when its epoch is left keeps the next one waiting, which the log tells."""
    monkeypatch.setattr(engine, "TELL_EVERY_S", 0.1)
    blocked = threading.Event()

    def source() -> Iterator[Any]:
        yield from batches()
        blocked.wait()

    with reader_of({"a:1": arithmetic}, source) as reader, structlog.testing.capture_logs() as logs:
        for number, _ in enumerate(reader, start=1):
            if number == BATCHES:
                break
        threading.Timer(0.6, blocked.set).start()
        assert numbers(list(reader)) == list(range(BATCHES))
    assert "source.still_busy" in [entry["event"] for entry in logs]


def test_items_without_rows_count_in_the_window() -> None:
    """A source of empty batches is not read to its end while nothing is taken."""
    read: list[int] = []

    def source() -> Iterator[Any]:
        for number in range(10_000):
            read.append(number)
            yield np.zeros((0, 4), np.float32), np.arange(0)

    with reader_of({"a:1": arithmetic}, source) as reader:
        next(iter(reader))
        wait_until(lambda: len(read) >= 5)
        time.sleep(0.1)  # in which it would read thousands
    assert len(read) <= 16


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


def test_outputs_that_the_model_lacks_are_said() -> None:
    """Wrong names can't be known before a teacher is; then they are the training script's to hear of."""
    teachers = FakeTeachers({"a:1": arithmetic})
    reader = DistillReader(
        batches, inputs=["x", "label"], outputs=["logits"], teachers=Fixed(("a:1",)), connect=teachers.connect
    )
    with reader, pytest.raises(SpecError, match=r"outputs: got 'logits'.*double, sum"):
        list(reader)


def test_closing_in_the_middle_ends_the_iteration() -> None:
    """`close` from elsewhere is an error in the loop, not a hang; so is iterating a closed reader."""
    reader = reader_of({"a:1": patiently})
    epoch = iter(reader)
    next(epoch)
    reader.close()
    reader.close()
    with pytest.raises(DistillError, match="closed"):
        list(epoch)
    with pytest.raises(DistillError, match="closed"):
        list(reader)


def test_a_forgotten_reader_leaves_no_threads() -> None:
    """A reader that nobody closed goes with its last reference."""
    reader = reader_of({"a:1": patiently})
    for _ in reader:
        break
    del reader
    gc.collect()
    wait_until(lambda: not any(thread.name.startswith("edl") for thread in threading.enumerate()))


def test_readers_share_a_reporter() -> None:
    """Steps of several readers and of phases without one add up to one job's progress."""
    with JobReporter(total_steps=4 * BATCHES, settings=RuntimeSettings()) as reporter:
        for _ in range(BATCHES):
            reporter.advance(samples=ROWS)
        for note in ("first", "second"):
            reporter.report(note=note, loss=0.5)
            with reader_of({"a:1": arithmetic}, reporter=reporter) as reader:
                list(reader)
        progress = reporter.progress()
    assert (progress.step, progress.total_steps) == (3 * BATCHES, 4 * BATCHES)
    assert (progress.note, progress.loss, progress.teachers) == ("second", 0.5, 0)
    assert progress.answered == {"a:1": 2 * BATCHES * 3}
    assert progress.samples_per_s > 0
    assert progress.time_left_s is not None


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("source", {"source": 3}),
    ("source", {"source": batches()}),
    ("inputs", {"inputs": "x"}),
    ("inputs", {"inputs": [None]}),
    ("inputs", {"inputs": ["x", "x"]}),
    ("outputs", {"outputs": []}),
    ("outputs", {"outputs": "double"}),
    ("format", {"format": "list"}),
    ("teachers", {"teachers": "a:1"}),
    ("teachers", {"teachers": None}),
    ("settings.redis_url", {"teachers": Discovered("pool")}),
    ("teacher_batch_size", {"teacher_batch_size": 0}),
    ("teacher_batch_size", {"teacher_batch_size": True}),
    ("total_steps", {"total_steps": 0}),
    ("total_steps", {"total_steps": 3, "reporter": JobReporter(settings=RuntimeSettings())}),
]


@pytest.mark.parametrize(("field", "given"), WRONG)
def test_wrong_arguments_are_said_at_once(field: str, given: dict[str, Any]) -> None:
    """The constructor names the argument, and starts nothing."""
    right = {
        "source": batches,
        "inputs": ["x"],
        "outputs": ["double"],
        "teachers": Fixed(("a:1",)),
        "settings": RuntimeSettings(),
    }
    with pytest.raises(SpecError) as caught:
        DistillReader(**{**right, **given})
    assert caught.value.field.startswith(field)
