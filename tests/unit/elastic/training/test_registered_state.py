"""What a script registers: kept in checkpoints, given back, and refused where it can't be."""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.elastic.local_run import SAMPLES, arrays_of, begin, model_and_optimizer, paddle, train

from edl_runtime.elastic.api import Run
from edl_runtime.elastic.comm.process_group import ProcessGroup
from edl_runtime.elastic.errors import GroupLostError, OtherModelError, StepError
from edl_runtime.elastic.training.learning_rate import encode_slots
from edl_runtime.elastic.training.loop import TURNS, RankTurn
from edl_runtime.elastic.training.state_parts import PartState, RegisteredState
from edl_runtime.errors import SpecError

pytestmark = pytest.mark.usefixtures("nothing_at_exit")

BATCHES: dict[str, Any] = {"global_batch": 4, "epochs": 2}


class Pair(NamedTuple):
    """No tuple that comes back as one."""

    left: int
    right: int


class Tensor:
    """One that is not Paddle's."""

    __module__ = "torch"

    def detach(self) -> Tensor:
        return self


LOOP: list[Any] = []
LOOP.append(LOOP)

VALUES: dict[Any, Any] = {
    "best": -math.inf,
    "misses": 3,
    "huge": 2**70,
    "name": "adam",
    "none": None,
    "pair": (1, [2.5, True]),
    "$odd": {7: "seven", "nested": {1.5: np.arange(3)}},
    "scalar": np.float32(0.1),
    "double": np.float64(math.nan),
    "empty": np.zeros((0, 2)),
    "tensor": paddle.full([2], 1.5, "bfloat16"),
    "a/b": np.ones(1),
    "a": {"b": np.zeros(1)},
    "__metadata__": np.ones(1),
    "ordered": OrderedDict(b=1, a=[2]),
}


def through_json(state: PartState) -> PartState:
    """Return a state as a checkpoint has it."""
    return PartState(dict(state.arrays), json.loads(json.dumps(state.values, allow_nan=False)))


def test_plain_values_come_back_as_they_were() -> None:
    """In the script's own dict, and with arrays of its own."""
    kept = dict(VALUES)
    part = RegisteredState("kept", kept)
    there = through_json(part.state())
    kept.clear()
    part.load(there)
    assert kept.keys() == VALUES.keys()
    for name in ("best", "misses", "huge", "name", "none", "pair"):
        assert kept[name] == VALUES[name]
    assert isinstance(kept["pair"], tuple)
    assert kept["$odd"][7] == "seven"
    assert kept["$odd"]["nested"][1.5].tolist() == [0, 1, 2]
    assert (kept["scalar"], kept["scalar"].dtype) == (np.float32(0.1), np.float32)
    assert math.isnan(kept["double"])
    assert {name: type(value) for name, value in kept.items()} == {name: type(each) for name, each in VALUES.items()}
    assert list(kept["ordered"].items()) == [("b", 1), ("a", [2])]
    assert kept["empty"].shape == (0, 2)
    assert (kept["tensor"].dtype, kept["tensor"].astype("float32").tolist()) == (paddle.bfloat16, [1.5, 1.5])
    assert (kept["a/b"].tolist(), kept["a"]["b"].tolist()) == ([1.0], [0.0])
    kept["a/b"] += 1
    assert there.arrays["a/b"].tolist() == [1.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_that_is_trained_comes_back_as_one(dtype: str) -> None:
    """And one that is not as one that is not."""
    kept = {"learned": paddle.ones([2], dtype), "counted": paddle.ones([2], dtype)}
    kept["learned"].stop_gradient = False
    part = RegisteredState("kept", kept)
    part.load(through_json(part.state()))
    assert {name: tensor.stop_gradient for name, tensor in kept.items()} == {"learned": False, "counted": True}
    assert kept["learned"].is_leaf


class Loads:
    """As PyTorch's objects are."""

    def __init__(self) -> None:
        self.state = OrderedDict(steps=0)

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = OrderedDict(state)


@pytest.mark.parametrize("make", [Loads, lambda: model_and_optimizer()[0]], ids=["load_state_dict", "set_state_dict"])
def test_objects_are_given_their_state_by_their_own_method(make: Callable[[], Any]) -> None:
    """PyTorch's word for it, and Paddle's: a second model may hold averaged weights."""
    first, second = make(), make()
    if isinstance(first, Loads):
        first.state["steps"] = 7
    else:
        first[0].weight.set_value(first[0].weight * 2)
    RegisteredState("kept", second).load(through_json(RegisteredState("kept", first).state()))
    assert str(first.state_dict()) == str(second.state_dict())


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("Best Score", {}, r"run\.register\(name\): got 'Best Score', allowed is a-z, 0-9"),
        ("model-2", {}, "not a name that run.wrap uses"),
        (
            "best",
            0.5,
            r"run\.register\('best'\): got 'float', allowed is a dict .* that the script changes in place",
        ),
        ("best", {"seen": {1, 2}}, r"got \"set at 'seen'\", allowed is None, bool, int, float"),
        ("best", {"deep": [{"x": object()}]}, r"object at 'deep/0/x'"),
        ("best", Counter("aab"), r"got 'Counter', allowed is a dict .no subclass."),
        ("best", {"seen": Counter()}, r"Counter at 'seen'.*which would come back as another"),
        ("best", {"seen": defaultdict(list)}, "defaultdict at 'seen'"),
        (
            "best",
            {"w": Tensor()},
            r"got \"torch\.Tensor at 'w'\", allowed is what \.detach\(\)\.cpu\(\)\.numpy\(",
        ),
        ("best", {"pair": Pair(1, 2)}, "Pair at 'pair'"),
        ("best", {"all": [paddle.nn.Linear(1, 1).weight]}, r"Parameter at 'all/0'.*given to run\.wrap"),
        ("best", {"loop": LOOP}, "values that don't contain themselves"),
        ("best", {"signal": signal.SIGTERM}, "Signals at 'signal'"),
        ("best", {"masked": np.ma.masked_array([1])}, "MaskedArray at 'masked'"),
        (
            "best",
            {"names": np.array(["a"])},
            r"run\.register\('best'\): got \"array of <U1 at 'names'\", allowed is float",
        ),
        ("best", {"names": np.array([None])}, r"run\.register\('best'\): got \"array of object at 'names'\""),
        ("best", {"name": np.str_("a")}, r"array of <U1 at 'name'"),
        ("best", {"file": os.fsdecode(b"\xff")}, r"at 'file'.*allowed is text that UTF-8 can hold"),
        ("best", {os.fsdecode(b"\xff"): 1}, "allowed is text that UTF-8 can hold"),
        ("taken", {}, "a name that is not registered yet"),
    ],
)
def test_what_can_t_be_kept_is_refused_at_once(name: str, target: Any, message: str) -> None:
    """With its place, and what may be kept instead."""
    run, _ = begin()
    run.register("taken", {})
    with pytest.raises(SpecError, match=message):
        run.register(name, target)


def test_what_comes_after_wrap_can_t_be_registered() -> None:
    """Its state would have been brought before it was there."""
    run, _ = begin()
    run.wrap(*model_and_optimizer())
    with pytest.raises(SpecError, match=r"allowed is a call before run\.wrap, which restores it"):
        run.register("late", {})


def counting(folder: Path, **names: dict[str, Any]) -> tuple[Run, Any, Any]:
    run, link = begin(folder)
    for name, target in names.items():
        assert run.register(name, target) is target
    model, _ = run.wrap(*model_and_optimizer())
    return run, model, link


def test_a_later_run_goes_on_with_what_the_script_did_after_the_last_step(tmp_path: Path) -> None:
    """Also where it is told to leave in that step: it leaves when it asks for its next batch."""
    counts = {"after": 0, "seen": np.zeros(2)}
    run, model, link = counting(tmp_path, counts=counts)

    def count() -> None:
        counts["after"] += 1
        counts["seen"] += 1

    with pytest.raises(SystemExit):
        train(
            run, model, run.data(SAMPLES, **BATCHES), between=lambda: run.step_number == 2 and link.stop(), after=count
        )
    assert run.step_number == 3

    found: dict[str, Any] = {}
    run, model, _ = counting(tmp_path, counts=found)
    assert (found["after"], found["seen"].tolist()) == (3, [3.0, 3.0])
    assert run.metrics().keys() == {"loss"}
    assert run.metrics(accuracy=0.5)["accuracy"] == 0.5


def test_other_names_than_a_checkpoint_s_are_refused(tmp_path: Path) -> None:
    """Those that only one of them has; nothing is taken over then."""
    run, model, _ = counting(tmp_path, best={"score": 0.5}, average={"w": np.ones(2)})
    train(run, model, run.data(SAMPLES, **BATCHES))
    best: dict[str, Any] = {}
    with pytest.raises(OtherModelError) as refused:
        counting(tmp_path, best=best, counter={"misses": 0})
    assert refused.value.differences == ["counter (run.register): here, not there", "average: there, not here"]
    assert "of another model, optimizer or registered state" in str(refused.value)
    assert best == {}


def test_a_mean_of_one_rank_is_its_own_value() -> None:
    """A tensor of one value is a number; it needs the loop over the data."""
    run, _ = begin()
    model, _ = run.wrap(*model_and_optimizer())
    with pytest.raises(StepError, match="outside of the loop over the data"):
        run.mean(1.0)
    means: list[float] = []
    train(run, model, run.data(SAMPLES, **BATCHES), after=lambda: means.append(run.mean(paddle.to_tensor([1.5]))))
    assert means == [1.5] * 6
    with pytest.raises(SpecError, match=r"run\.mean: got 'high', allowed is a number"):
        run.mean("high")
    with pytest.raises(SpecError, match=r"run\.mean"):
        run.mean(10**400)
    with pytest.raises(StepError, match="before the training ends"):
        run.mean(1.0)


class OfTwo(ProcessGroup):
    """Rank 0 of two. `others`: what the other one says each time: its turn, how many samples it has, and its value."""

    world_size = 2

    def __init__(self, *others: tuple[RankTurn, int, float | None]) -> None:
        self._others = list(others)

    def all_reduce_counts(self, counts: np.ndarray) -> np.ndarray:
        turn, samples, value = self._others.pop(0)
        theirs = np.zeros_like(counts)
        theirs[1], theirs[3] = samples, TURNS.index(turn)
        theirs[-2:] = encode_slots(value, 1, 2)
        return counts + theirs


@pytest.mark.parametrize(
    ("others", "mean"),
    [
        ([("averages", 0, 3.0)], 2.0),
        ([("follows", 4, None)], 1.0),  # it has joined, or had no batch in the step before
        ([("idles", 0, None)], 1.0),
        ([("ends", 0, None)], 1.0),  # it had no batch in the last step
    ],
)
def test_a_mean_is_of_the_ranks_whose_scripts_come_to_it(others: list[Any], mean: float) -> None:
    """The others take part in it on their way to a step or to the end."""
    run, _ = begin()
    run.wrap(*model_and_optimizer())
    next(iter(run.data(SAMPLES, **BATCHES)))
    run._session.group = OfTwo(*others)
    assert run.mean(1.0) == mean


def test_a_rank_takes_part_in_the_means_of_others_if_its_script_had_no_turn() -> None:
    """Then it goes on with its own step. One that had its turn and does not come to them is an error on all ranks."""
    run, _ = begin()
    model, _ = run.wrap(*model_and_optimizer())
    batches = iter(run.data(SAMPLES, **BATCHES))
    training = run._wrapped
    assert training is not None
    model(next(batches)[0]).mean().backward()
    training._had_no_batch = True
    run._session.group = OfTwo(("averages", 0, 3.0), ("averages", 0, 5.0), ("steps", 0, None))
    assert run.step()
    assert run.step_number == 1
    model(next(batches)[0]).mean().backward()
    run._session.group = OfTwo(("averages", 0, 3.0))
    with pytest.raises(StepError, match=r"called after step 1 on ranks \[1\] only, of 2; call it on all ranks"):
        run.step()


class Lost(ProcessGroup):
    """A group that is lost as soon as anything is counted."""

    def all_reduce_counts(self, counts: np.ndarray) -> np.ndarray:
        raise GroupLostError(1, f"the test, in front of {len(counts)} numbers")


def test_a_batch_comes_again_when_another_rank_is_lost_in_a_mean_before_its_step() -> None:
    """Its step says so, and what the script does after it is undone, to end the training among it."""
    run, link = begin()
    counts = run.register("counts", {"after": 0})
    model, _ = run.wrap(*model_and_optimizer())
    batches = iter(run.data(SAMPLES, **BATCHES))
    inputs, numbers = next(batches)
    model(inputs).mean().backward()
    run._session.group = Lost()
    link._generation = 2
    assert run.mean(3.0) == 3.0
    assert run.generation == 2
    assert run.step() is False
    counts["after"] += 1
    run.finish()
    inputs, again = next(batches)
    assert (again.tolist(), counts["after"], run.step_number) == (numbers.tolist(), 0, 0)
    model(inputs).mean().backward()
    assert run.step() is True
    counts["after"] += 1
    run.finish()
    assert (list(batches), counts["after"], run.step_number) == ([], 1, 1)


class LostOnceTold(Lost):
    """The same, but for the first count: there all have been told of the next generation."""

    world_size = 2
    told = False

    def all_reduce_counts(self, counts: np.ndarray) -> np.ndarray:
        if self.told:
            super().all_reduce_counts(counts)
        self.told, counts[0] = True, 2
        return counts


def test_a_generation_that_is_due_is_entered_once_when_another_rank_is_lost_in_a_mean() -> None:
    """Nobody waits for one more after it, which may never come."""
    run, link = begin()
    model, _ = run.wrap(*model_and_optimizer())
    training = run._wrapped
    assert training is not None
    batches = iter(run.data(SAMPLES, **BATCHES))
    model(next(batches)[0]).mean().backward()
    run._session.group = LostOnceTold()
    link._generation = 2
    assert run.step()
    assert training._regroup_due
    assert run.mean(3.0) == 3.0
    assert not training._regroup_due
    next(batches)
    assert (run.generation, run.step_number) == (2, 1)


def test_epochs_are_seen() -> None:
    """By number, with a place after each, before the last checkpoint; the batches are those of the plain loop."""
    run, _ = begin()
    with pytest.raises(SpecError, match=r"run\.epoch: got 'a use before run\.wrap'"):
        _ = run.epoch
    plain, _ = run.wrap(*model_and_optimizer())
    seen = train(run, plain, run.data(SAMPLES, **BATCHES))

    run, _ = begin()
    model, _ = run.wrap(*model_and_optimizer())
    told = []
    again: list[list[int]] = []
    for epoch, batches in run.data(SAMPLES, **BATCHES).epochs():
        assert run.epoch == epoch
        again += train(run, model, batches)
        told.append((epoch, run.epoch, run.step_number, run.mean(epoch)))
    assert told == [(0, 1, 3, 0.0), (1, 2, 6, 1.0)]
    assert again == seen
    for name, value in arrays_of(plain).items():
        np.testing.assert_array_equal(arrays_of(model)[name], value)
