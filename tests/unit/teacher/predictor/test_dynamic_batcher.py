"""What a predictor does with requests that wait for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from edl_runtime.protocol.infer_messages import decode_response, encode_request
from edl_runtime.protocol.oip import JOIN_EXTENSION, ModelSignature, Normalise, TensorSpec, TopK
from edl_runtime.protocol.tensors import Array
from edl_runtime.teacher.predictor.batcher import MAX_JOINED_RUN_S, DynamicBatcher
from edl_runtime.teacher.predictor.execute import EncodedAnswer, with_extensions
from edl_runtime.teacher.shm.arena import IDLE, RUNNING, Arena


class Doubler:
    """Doubles its input and notes the batch sizes that it was run with. A negative number is too much for it.

    It answers `most` rows of what it is asked, and none when these are `too_many`.
    """

    def __init__(self, *, most: int = 1000, too_many: int = 1000, row_s: float = 0.0) -> None:
        self.runs: list[int] = []
        self.now_s = 0.0
        self._most = most
        self._too_many = too_many
        self.row_s = row_s
        self.signature = ModelSignature(
            name="m",
            inputs=(TensorSpec("x", "FP32", (-1, 4)),),
            outputs=(TensorSpec("double", "FP32", (-1, 4)), TensorSpec("sum", "FP32", (-1,))),
        )

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        x = inputs["x"]
        self.runs.append(len(x))
        self.now_s += self.row_s * len(x)
        if (x < 0).any():
            raise ArithmeticError("below zero")
        if len(x) >= self._too_many:
            raise MemoryError
        every = {"double": x * 2, "sum": x.sum(axis=1)}
        return {name: every[name][: self._most] for name in outputs}


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(1 << 16)
    yield arena
    arena.close()


def batcher_of(model: Doubler, arena: Arena, most: int = 64) -> DynamicBatcher:
    """Return a batcher by whose clock runs take as long as the model says."""
    return DynamicBatcher(model, arena, most, clock_s=lambda: model.now_s)


def put(arena: Arena, slot: int, numbers: Array, *outputs: str | TopK, **normalise: Normalise) -> tuple[int, int, int]:
    """Write a request into its slot; return the record for it."""
    header, buffers, size, _ = encode_request({"x": numbers}, outputs, normalise)
    arena.request(slot)[:size] = header + b"".join(part.tobytes() for part in buffers)
    return slot, size, len(header)


def got(arena: Arena, slot: int, answer: EncodedAnswer) -> dict[str, Array]:
    area = arena.answer(slot)
    assert answer.status == 200, bytes(area[: answer.size])
    assert answer.json_size is not None
    arrays, unfilled = decode_response(area[: answer.json_size], answer.size - answer.json_size)
    start = answer.json_size
    for array in unfilled:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(area[start : start + array.nbytes], np.uint8)
        start += array.nbytes
    return arrays


def refused(arena: Arena, slot: int, answer: EncodedAnswer) -> str:
    assert answer.status != 200
    return str(msgspec.json.decode(arena.answer(slot)[: answer.size])["error"])


def add_rows(work: DynamicBatcher, arena: Arena, *numbers: float) -> None:
    """Have each slot ask for the sum of a row."""
    for slot, number in enumerate(numbers):
        work.add(*put(arena, slot, rows(number), "sum"))


def ran(work: DynamicBatcher) -> dict[int, EncodedAnswer]:
    return {slot: answer for run in work.run() for slot, answer in run.answers}


def rows(*numbers: float) -> Array:
    return np.repeat(np.array(numbers, np.float32)[:, None], 4, axis=1)


def test_requests_that_have_queued_run_as_one_and_get_their_own_answers(arena: Arena) -> None:
    """Each its own rows, of its own outputs, whole or the largest of them, from numbers or from pixels."""
    model = Doubler()
    work = batcher_of(model, arena)
    work.add(*put(arena, 3, rows(1), "double"))
    work.add(*put(arena, 1, rows(2), "sum", TopK("double", 2)))
    work.add(*put(arena, 2, np.full((1, 4), 9, np.uint8), x=Normalise((1.0,), (2.0,))))
    work.add(*put(arena, 0, rows(5), "sum"))
    answers = ran(work)
    assert (model.runs, len(work)) == ([4], 0)
    assert list(answers) == [3, 1, 2, 0]
    assert got(arena, 3, answers[3])["double"].tolist() == [[2] * 4]
    second = got(arena, 1, answers[1])
    assert (list(second), second["sum"].tolist()) == (["sum", "double.values", "double.indices"], [8])
    assert (second["double.values"].tolist(), second["double.indices"].shape) == ([[4, 4]], (1, 2))
    assert got(arena, 2, answers[2])["sum"].tolist() == [16]
    assert list(got(arena, 0, answers[0])) == ["sum"]


def test_the_rest_stays_queued_in_order(arena: Arena) -> None:
    """What a run has no room for is in the next, together with what has come since."""
    model = Doubler()
    work = batcher_of(model, arena, 2)
    add_rows(work, arena, 0, 1, 2)
    assert list(ran(work)) == [0, 1]
    work.add(*put(arena, 3, rows(3)))
    assert list(ran(work)) == [2, 3]
    assert (model.runs, len(work)) == ([2, 2], 0)


def test_a_bad_request_fails_no_other(arena: Arena) -> None:
    """When a joined run raises, each runs alone; those that are good are joined again the next time."""
    model = Doubler()
    work = batcher_of(model, arena)
    for _ in range(2):
        add_rows(work, arena, 1, -1)
        answers = ran(work)
        assert got(arena, 0, answers[0])["sum"].tolist() == [4]
        assert refused(arena, 1, answers[1]) == "the model failed: ArithmeticError: below zero"
    assert model.runs == [2, 1, 1] * 2


def test_a_joined_run_that_failed_has_kept_the_model_busy(arena: Arena) -> None:
    """It counts as the runs behind it do, and answers nobody."""
    model = Doubler(most=1, row_s=0.125)
    work = batcher_of(model, arena)
    add_rows(work, arena, 0, 1)
    runs = [(run.rows, run.busy_s, [slot for slot, _ in run.answers]) for run in work.run()]
    assert runs == [(2, 0.25, []), (1, 0.125, [0]), (1, 0.125, [1])]


def test_what_a_model_raises_is_logged_without_its_variables(arena: Arena) -> None:
    """Where it came from, as text: to format all variables would take a second, and they are students' data."""
    work = batcher_of(Doubler(), arena)
    work.add(*put(arena, 0, rows(-1)))
    with capture_logs() as logs:
        ran(work)
    (failed,) = logs
    assert (failed["event"], failed["log_level"], "exc_info" in failed) == ("model.failed", "error", False)
    assert failed["exception"].startswith("Traceback (most recent call last)")
    assert failed["exception"].endswith("ArithmeticError: below zero\n")


def test_an_error_that_is_no_text_is_told(arena: Arena) -> None:
    """The name of a file may be any bytes; bytes that are not UTF-8 are replaced, and the next request is served."""

    class Lost(Doubler):
        def run(self, *_: object) -> dict[str, Array]:
            raise FileNotFoundError(os.fsdecode(b"/data/\xff.bin"))

    work = batcher_of(Lost(), arena)
    add_rows(work, arena, 0, 1)
    with capture_logs() as logs:
        answers = ran(work)
    assert refused(arena, 1, answers[1]) == "the model failed: FileNotFoundError: /data/?.bin"
    assert logs[0]["exception"].endswith("FileNotFoundError: /data/?.bin\n")


def runs_twice(model: Doubler, arena: Arena, *, requests: int) -> list[int]:
    """Return the batch sizes in which so many requests are answered, and then as many again."""
    work = batcher_of(model, arena)
    for _ in range(2):
        add_rows(work, arena, *range(requests))
        while work:
            for slot, answer in ran(work).items():
                assert got(arena, slot, answer)["sum"].tolist() == [4 * slot]
    return model.runs


def test_a_model_that_can_not_take_several_gets_one_at_a_time(arena: Arena) -> None:
    """It answers less than it was given: each request is answered alone, and joining is not tried again."""
    assert runs_twice(Doubler(most=1), arena, requests=2) == [2, 1, 1, 1, 1]


def test_a_model_that_can_not_take_so_many_gets_fewer(arena: Arena) -> None:
    """Short of memory for all that has queued, it still gains by what fits."""
    assert runs_twice(Doubler(too_many=8), arena, requests=8) == [8, *[1] * 8, 4, 4]


class Rows(Doubler):
    """Answers as many numbers for each row as it was given rows, or as `width` says."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self._width = width
        self.signature = msgspec.structs.replace(self.signature, outputs=(TensorSpec("each", "FP32", (-1, -1)),))

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        x = inputs["x"]
        self.runs.append(len(x))
        return {name: np.repeat(x[:, :1], self._width or len(x), axis=1) for name in outputs}


def test_a_model_whose_answers_are_as_wide_as_the_batch_is_not_joined(arena: Arena) -> None:
    """No answer depends on other requests."""
    model = Rows()
    work = batcher_of(model, arena)
    for _ in range(2):
        for slot in range(4):
            work.add(*put(arena, slot, rows(slot, slot)))
        while work:
            for slot, answer in ran(work).items():
                assert got(arena, slot, answer)["each"].tolist() == [[slot] * 2] * 2


def test_a_free_axis_that_does_not_depend_on_the_batch_is_proved_so_once(arena: Arena) -> None:
    """It costs one run more, also where it happens to be as wide as a joined run has rows."""
    model = Rows(width=2)
    work = batcher_of(model, arena)
    for _ in range(2):
        for slot in range(2):
            work.add(*put(arena, slot, rows(slot)))
        for slot, answer in ran(work).items():
            assert got(arena, slot, answer)["each"].tolist() == [[slot] * 2]
    assert model.runs == [1, 2, 2]


def test_a_largest_batch_of_one_joins_no_requests(arena: Arena) -> None:
    """With a largest batch of 1, every request runs alone, whatever its size."""
    model = Doubler()
    work = batcher_of(model, arena, 1)
    for slot in range(3):
        work.add(*put(arena, slot, rows(1, 2)))
    while work:
        assert len(ran(work)) == 1
    assert model.runs == [2, 2, 2]


def test_joined_runs_are_kept_short(arena: Arena) -> None:
    """A model of which two rows take as long as a joined run may is given no more than two at once."""
    model = Doubler(row_s=MAX_JOINED_RUN_S / 2)
    work = batcher_of(model, arena)
    work.add(*put(arena, 0, rows(1)))
    (run,) = work.run()
    assert (run.rows, run.busy_s) == (1, MAX_JOINED_RUN_S / 2)
    add_rows(work, arena, 1, 1, 1, 1)
    while work:
        ran(work)
    assert model.runs == [1, 2, 2]


def test_a_failed_run_does_not_change_the_estimated_duration(arena: Arena) -> None:
    """What a model does before it raises may take any time; requests are joined as before."""
    model = Doubler(row_s=2 * MAX_JOINED_RUN_S)
    work = batcher_of(model, arena)
    work.add(*put(arena, 0, rows(-1)))
    ran(work)
    model.row_s = 0.0
    add_rows(work, arena, 1, 1, 1, 1)
    ran(work)
    assert model.runs == [1, 4]


def test_a_request_that_nobody_waits_for_does_not_run(arena: Arena) -> None:
    """What is dropped is answered once; what is not there any more has had its answer."""
    model = Doubler()
    work = batcher_of(model, arena)
    add_rows(work, arena, 0, 1)
    dropped = work.drop(0)
    assert dropped is not None
    assert refused(arena, 0, dropped) == "the client disconnected before the request ran"
    assert work.drop(0) is None
    assert (list(ran(work)), model.runs) == ([1], [1])


def test_a_teacher_says_what_it_can_do_beyond_the_standard() -> None:
    """The largest of an output that has several numbers a sample; pixels where the model takes FP32 images."""
    assert with_extensions(Doubler().signature).extensions == ("top_k", "normalise")
    assert with_extensions(Doubler().signature, joins=True).extensions == ("top_k", "normalise", JOIN_EXTENSION)
    flat = ModelSignature(
        name="m", inputs=(TensorSpec("ids", "INT64", (-1, 4)),), outputs=(TensorSpec("best", "INT64", (-1,)),)
    )
    assert with_extensions(flat) == flat
    fixed = msgspec.structs.replace(flat, inputs=(TensorSpec("ids", "INT64", (8, 4)),))
    assert with_extensions(fixed, joins=True) == fixed


def test_a_request_that_can_not_be_served_waits_for_nobody(arena: Arena) -> None:
    """It is refused before anything runs; a top-k that turns out too large, after its run."""
    model = Doubler()
    work = batcher_of(model, arena)
    answer = work.add(*put(arena, 0, np.zeros((1, 5), np.float32)))
    assert answer is not None
    assert answer.status == 400
    assert "shape is [1, 5], the model takes [-1, 4]" in refused(arena, 0, answer)
    model.signature = msgspec.structs.replace(model.signature, outputs=(TensorSpec("double", "FP32", (-1, -1)),))
    for slot, k in enumerate([5, 4]):
        work.add(*put(arena, slot, rows(1), TopK("double", k)))
    answers = ran(work)
    assert [answer.status for answer in answers.values()] == [400, 200]
    assert "output 'double': top_k is 5, allowed is at most 4" in refused(arena, 0, answers[0])


def test_a_request_that_is_to_run_alone_does(arena: Arena) -> None:
    """A predictor died under it: what ran together with it would be suspected, too."""
    model = Doubler()
    work = batcher_of(model, arena)
    arena.alone[1] = 1
    add_rows(work, arena, 1, 2, 3)
    answered: list[int] = []
    while work:
        answered += ran(work)
    assert (model.runs, answered) == ([2, 1], [0, 2, 1])


@pytest.mark.parametrize("number", [1, -1])
def test_what_runs_is_noted_where_it_outlives_the_process(arena: Arena, number: float) -> None:
    """Those of a joined run together, and each alone; those that wait are not."""
    seen: list[list[int]] = []

    class Noting(Doubler):
        def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
            seen.append([slot for slot in range(arena.slots) if arena.stages[slot] == RUNNING])
            return super().run(inputs, outputs)

    work = batcher_of(Noting(), arena)
    add_rows(work, arena, number, number)
    ran(work)
    assert seen == ([[0, 1]] if number > 0 else [[0, 1], [0], [1]])
    assert set(arena.stages) == {IDLE}
