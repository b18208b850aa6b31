"""DistillReader against teachers that are told how to behave."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from support.students.fake_readers import BATCHES, ROWS, batches, numbers, patiently, reader_of
from support.teachers.fakes import FakeTeachers, arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill import Discovered, DistillReader, Fixed, JobReporter
from edl_runtime.distill.errors import DistillError
from edl_runtime.distill.teacher_connections import WORKERS_PER_TEACHER
from edl_runtime.errors import SpecError
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings


def test_epochs_are_in_order_and_whole() -> None:
    """Each yields every batch once, in its order, however many teachers answer."""
    with reader_of({"a:1": patiently, "b:2": arithmetic, "c:3": patiently}) as reader:
        for _ in range(3):
            assert numbers(list(reader)) == list(range(BATCHES))
        stats = reader.stats()
    assert (stats.batches, stats.samples, stats.epoch) == (3 * BATCHES, 3 * BATCHES * ROWS, 2)
    assert sum(stats.answered.values()) == 3 * BATCHES * 3
    assert reader.stats().teachers == 0


def test_a_teacher_gets_work_as_fast_as_it_does_it() -> None:
    """A fast one is asked more while a slow one is asked nothing but what it has begun."""
    asked_of_slow = []

    def fast(x: Array) -> dict[str, Array]:
        wait_until(lambda: teachers.asked["a:1"] > 0)  # else all may be done before the slow one is connected
        return arithmetic(x)

    def slow(x: Array) -> dict[str, Array]:
        wait_until(lambda: teachers.asked["b:2"] > 3 * WORKERS_PER_TEACHER)
        asked_of_slow.append(teachers.asked["a:1"])
        return arithmetic(x)

    teachers = FakeTeachers({"a:1": slow, "b:2": fast})
    with reader_of(teachers) as reader:
        assert numbers(list(reader)) == list(range(BATCHES))
    assert asked_of_slow[0] <= WORKERS_PER_TEACHER


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


def test_only_answers_in_delivered_batches_are_counted() -> None:
    """Epochs that are left early count what was taken, however much was asked ahead."""
    with reader_of({"a:1": arithmetic, "b:2": patiently}) as reader:
        for _ in range(5):
            for _ in reader:
                break
        stats = reader.stats()
    assert (stats.batches, sum(stats.answered.values())) == (5, 5 * 3)


def test_closing_ends_the_iteration() -> None:
    """`close` from elsewhere is an error in the loop, not a hang; so is iterating a closed reader, begun or not."""
    reader = reader_of({"a:1": patiently})
    epoch = iter(reader)
    next(epoch)
    reader.close()
    reader.close()
    with pytest.raises(DistillError, match="closed"):
        list(epoch)
    with pytest.raises(DistillError, match="closed"):
        list(reader)
    teachers = FakeTeachers({"a:1": arithmetic})
    reader = reader_of(teachers)
    reader.close()
    with pytest.raises(DistillError, match="closed"):
        list(reader)
    assert not teachers.asked


def test_a_delivered_batch_is_the_script_s_alone() -> None:
    """The reader holds on to none, though its teachers' connections wait for what comes next."""
    arrays = []

    def source() -> Iterator[Any]:
        for x, labels in batches():
            arrays.append(weakref.ref(x))
            yield x, labels

    with reader_of({"a:1": patiently, "b:2": patiently}, source) as reader:
        for _ in reader:
            pass
        del _
        wait_until(lambda: not any(array() is not None for array in arrays))


def test_readers_share_a_reporter() -> None:
    """Steps of several readers and of phases without one add up to one job's progress."""
    with JobReporter(total_steps=4 * BATCHES, settings=RuntimeSettings()) as reporter:
        for _ in range(BATCHES):
            reporter.advance(samples=ROWS)
        for note in ("first", "second"):
            reporter.report(note=note, loss=0.5)
            with reader_of({"a:1": arithmetic}, reporter=reporter) as reader:
                list(reader)
                reader.report(metrics={note: 0.9})
        progress = reporter.progress()
    assert (progress.step, progress.total_steps) == (3 * BATCHES, 4 * BATCHES)
    assert (progress.note, progress.loss, progress.teachers) == ("second", 0.5, 0)
    assert progress.metrics == {"first": 0.9, "second": 0.9}
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
    ("allow_nan", {"allow_nan": "no"}),
    *(("tokenizer", {"tokenizer": wrong}) for wrong in ("/no/tokenizer.json", "/", 3)),
    *(("total_steps", {"total_steps": wrong}) for wrong in (0, True, "16")),
    ("total_steps", {"total_steps": 3, "reporter": JobReporter(settings=RuntimeSettings())}),
]


@pytest.mark.parametrize(("field", "given"), WRONG)
def test_wrong_arguments_are_refused_at_once(field: str, given: dict[str, Any]) -> None:
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
