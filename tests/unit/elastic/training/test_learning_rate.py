"""Learning rates: those that a script sets, and how they follow the number of instances."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.elastic.local_run import SAMPLES, begin, model_and_optimizer, paddle, train

from edl_runtime.elastic.api import schedule_steps
from edl_runtime.elastic.training.learning_rate import (
    LearningRate,
    RateScale,
    decode_slots,
    encode_slots,
    scaling_factor,
)
from edl_runtime.errors import SpecError

pytestmark = pytest.mark.usefixtures("nothing_at_exit")

lrs = paddle.optimizer.lr
BATCHES: dict[str, Any] = {"global_batch": 4, "epochs": 2}


def number() -> tuple[Any, Any]:
    """Return an optimizer whose rate a script sets, and how it halves it."""
    optimizer = model_and_optimizer(rate=1.0)[1]
    return optimizer, lambda: optimizer.set_lr(optimizer.get_lr() / 2)


def scheduled() -> tuple[Any, Any]:
    """Return one whose rate a script's scheduler moves, and how."""
    scheduler = paddle.optimizer.lr.ExponentialDecay(1.0, 0.5)
    return model_and_optimizer(rate=scheduler)[1], scheduler.step


@pytest.mark.parametrize("kind", [number, scheduled])
def test_a_lost_step_restores_the_rate_of_its_batch(kind: Any) -> None:
    """The script's changes since then, and until that batch comes again, belong to the lost step."""
    optimizer, lower = kind()
    rate = LearningRate(optimizer)
    rate.note_batch()
    lower()
    with rate.of_step(rate.value, 1.0):
        pass
    rate.end_batch()
    lower()  # which belongs to that step
    rate.note_batch()
    lower()
    rate.undo_step()
    assert rate.value == 0.25
    rate.await_repeat()
    lower()
    rate.note_batch()
    assert rate.value == 0.25
    lower()
    rate.undo_step()  # and once more
    assert rate.value == 0.25
    rate.await_repeat()
    rate.note_batch()
    lower()
    assert rate.value == 0.125


@pytest.mark.parametrize("kind", [number, scheduled])
def test_a_lost_step_without_a_batch_undoes_no_change(kind: Any) -> None:
    """A rank without a batch has set its rate for the step before; later changes stay, too."""
    optimizer, lower = kind()
    rate = LearningRate(optimizer)
    rate.note_batch()
    with rate.of_step(1.0, 1.0):
        pass
    rate.end_batch()
    lower()
    rate.undo_step()
    assert rate.value == 0.5
    rate.await_repeat()
    lower()
    with rate.of_step(rate.value, 1.0):
        pass
    rate.end_batch()
    rate.note_batch()
    assert rate.value == 0.25


def test_a_step_takes_the_agreed_rate_times_the_factor() -> None:
    """A number stays the agreed one; a scheduler continues from its own."""
    for kind, after in ((number, 3.0), (scheduled, 1.0)):
        optimizer, lower = kind()
        rate = LearningRate(optimizer)
        with rate.of_step(3.0, 4.0):
            assert optimizer.get_lr() == 12.0
        assert rate.value == after
        lower()
        assert optimizer.get_lr() == after / 2


def test_ranks_learn_the_numbers_of_those_that_have_one() -> None:
    """Bit for bit, also 0 and NaN."""
    for rates in ([0.1, 0.2, None], [None, 1 / 3, 0.1], [None, 0.0, 1.0], [-0.5, None, None], [math.inf, 1.0, None]):
        slots = [encode_slots(rate, rank, 3) for rank, rate in enumerate(rates)]
        found = decode_slots([sum(each) for each in zip(*slots, strict=True)])
        assert found == [rate for rate in rates if rate is not None]
    (number,) = decode_slots(encode_slots(math.nan, 1, 2))
    assert math.isnan(number)
    assert decode_slots(encode_slots(None, 1, 2)) == []


def test_a_later_run_continues_with_the_rate_that_the_script_has_set(tmp_path: Path) -> None:
    """The checkpoint's rate, not the optimizer's initial one; a rate that is set after `wrap` counts."""
    run, link = begin(tmp_path)
    model, optimizer = run.wrap(*model_and_optimizer(rate=0.1))
    batches = iter(run.data(SAMPLES, **BATCHES))
    model(next(batches)[0]).mean().backward()
    optimizer.set_lr(0.0123)
    link.stop()
    run.step()
    with pytest.raises(SystemExit):
        next(batches)
    later, _ = begin(tmp_path)
    model, optimizer = later.wrap(*model_and_optimizer(rate=0.1))
    assert later.learning_rate == optimizer.get_lr() == 0.0123
    optimizer.set_lr(0.5)
    assert later.learning_rate == 0.5
    train(later, model, later.data(SAMPLES, **BATCHES), steps=1)
    assert optimizer.get_lr() == 0.5


class Counting(lrs.LRScheduler):  # type: ignore[misc]
    """A script's own scheduler has a count that its state_dict lacks, and a setting."""

    def __init__(self, by: float) -> None:
        self.by, self.count = by, 0
        super().__init__(1.0)

    def get_lr(self) -> float:
        self.count += 1
        return self.base_lr / (1 + self.by * self.count)  # type: ignore[no-any-return]


SCHEDULERS: dict[str, Callable[[], Any]] = {
    "CosineAnnealingDecay": lambda: lrs.CosineAnnealingDecay(1.0, 7),
    "CosineAnnealingWarmRestarts": lambda: lrs.CosineAnnealingWarmRestarts(1.0, T_0=2, T_mult=2),
    "Counting": lambda: Counting(0.1),
    "CyclicLR": lambda: lrs.CyclicLR(0.1, 1.0, 3, 2, mode="triangular2"),
    "ExponentialDecay": lambda: lrs.ExponentialDecay(1.0, 0.9),
    "InverseTimeDecay": lambda: lrs.InverseTimeDecay(1.0, 0.1),
    "LambdaDecay": lambda: lrs.LambdaDecay(1.0, lambda epoch: 0.9**epoch),
    "LinearLR": lambda: lrs.LinearLR(1.0, 9),
    "LinearWarmup": lambda: lrs.LinearWarmup(SCHEDULERS["CosineAnnealingWarmRestarts"](), 3, 0.0, 1.0),
    "LambdaDecay of numpy": lambda: lrs.LambdaDecay(1.0, lambda epoch: np.cos(epoch / 100)),
    "MultiStepDecay": lambda: lrs.MultiStepDecay(1.0, [3, 9]),
    "MultiplicativeDecay": lambda: lrs.MultiplicativeDecay(1.0, lambda _: 0.95),
    "NaturalExpDecay": lambda: lrs.NaturalExpDecay(1.0, 0.1),
    "NoamDecay": lambda: lrs.NoamDecay(16, 5),
    "OneCycleLR": lambda: lrs.OneCycleLR(1.0, 40),
    "PiecewiseDecay": lambda: lrs.PiecewiseDecay([3, 9], [1.0, 0.1, 0.01]),
    "PolynomialDecay": lambda: lrs.PolynomialDecay(1.0, 7, cycle=True),
    "StepDecay": lambda: lrs.StepDecay(1.0, 3),
}
"""Paddle's, and a script's own."""


def test_all_schedulers_of_paddle_are_compared() -> None:
    """Only the one that is refused is left out: it follows from the loss."""
    assert {*lrs.__all__} - {"LRScheduler", "ReduceOnPlateau"} <= SCHEDULERS.keys()


def rates_after(rate: LearningRate, steps: int) -> list[float]:
    """Step the scheduler so often and return the rates."""
    found = []
    for _ in range(steps):
        rate.scheduler.step()
        found.append(rate.value)
    return found


@pytest.mark.filterwarnings("ignore:There are some unused values")  # Paddle's own, of LinearWarmup's state
@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("done", [0, 1, 4, 5, 13])
def test_a_schedule_that_goes_on_elsewhere_has_the_same_rates(scheduler: Callable[[], Any], done: int) -> None:
    """In a rank that joins or a later run, and where a step is lost."""
    first, later = (LearningRate(model_and_optimizer(rate=scheduler())[1]) for _ in range(2))
    undisturbed = LearningRate(model_and_optimizer(rate=scheduler())[1])
    wanted = rates_after(undisturbed, done + 20)[done:]
    rates_after(first, done)
    state = msgspec.json.decode(msgspec.json.encode(first.state()))
    later.load(state)
    assert rates_after(later, 20) == wanted
    first.note_batch()
    rates_after(first, 3)
    first.undo_step()
    assert rates_after(first, 20) == wanted


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("done", [0, 1, 4, 5, 13])
def test_a_checkpoint_of_an_earlier_version_restarts_a_cosine_where_it_was(factor: int, done: int) -> None:
    """It has the epoch only, which says where."""
    first, later = (
        LearningRate(model_and_optimizer(rate=lrs.CosineAnnealingWarmRestarts(1.0, T_0=2, T_mult=factor))[1])
        for _ in range(2)
    )
    rates_after(first, done)
    later.load({"scheduler": first.state()["scheduler"]})
    assert later.value == first.value
    assert rates_after(later, 20) == rates_after(first, 20)


def test_a_scheduler_whose_state_no_checkpoint_can_hold_is_named() -> None:
    """The error says what it has."""
    scheduler = Counting(0.1)
    scheduler.state_dict = lambda: {"history": {1.0: np.ones(3)}}
    with pytest.raises(SpecError, match="LRScheduler's state_dict: got 'ndarray', allowed is values that JSON"):
        LearningRate(model_and_optimizer(rate=scheduler)[1]).state()


def test_a_later_run_may_give_a_scheduler_other_settings() -> None:
    """What has not changed is not in a checkpoint; what has is."""
    first, later = (LearningRate(model_and_optimizer(rate=Counting(by))[1]) for by in (0.1, 0.5))
    rates_after(first, 3)
    later.load(first.state())
    assert (later.scheduler.by, later.scheduler.count) == (0.5, 4)


def test_a_later_run_continues_a_schedule_by_samples(tmp_path: Path) -> None:
    """From the checkpoint on, to the step that one instance would end with."""
    wanted = schedule_steps(len(SAMPLES), 4, epochs=2)
    assert wanted == 6
    for steps in (1, None):
        run, link = begin(tmp_path)
        model, optimizer = run.wrap(
            *model_and_optimizer(rate=paddle.optimizer.lr.ExponentialDecay(0.1, 0.5)), schedule="samples"
        )
        batches = iter(run.data(SAMPLES, instance_batch=4, epochs=2))
        train(run, model, batches, steps=steps, before=link.stop if steps else None)
        if steps:
            with pytest.raises(SystemExit):
                next(batches)
    assert optimizer.get_lr() == pytest.approx(0.1 * 0.5**wanted)


def test_two_lost_steps_in_a_row_keep_what_other_ranks_have_applied() -> None:
    """The second restores what the rank received after the first."""
    rate = LearningRate(model_and_optimizer(rate=1.0)[1])
    rate.note_batch()
    rate.undo_step()
    rate.load({"rate": 0.5})  # of a rank that has applied the step
    rate.await_repeat()
    rate.undo_step()
    assert rate.value == 0.5


def test_factors_of_the_known_scalings() -> None:
    """The script's own rate is that of one instance."""
    assert [scaling_factor("fixed", size) for size in (1, 4)] == [1, 1]
    assert [scaling_factor("linear", size) for size in (1, 4)] == [1, 4]
    assert [scaling_factor("sqrt", size) for size in (1, 4)] == [1, 2]
    assert scaling_factor(lambda size: 1 + size, 4) == 5


def test_a_rate_grows_gradually_and_falls_at_once() -> None:
    """Only a growing rate could make training diverge."""
    grown = RateScale().towards(4.0, 10, 3)
    assert [grown.at(step) for step in (10, 11, 12, 13, 99)] == [1.75, 2.5, 3.25, 4.0, 4.0]
    assert grown.towards(4.0, 11, 3) is grown
    shrunk = grown.towards(2.0, 20, 3)
    assert [shrunk.at(step) for step in (20, 21)] == [2.0, 2.0]


def test_a_change_during_a_warm_up_continues_from_there() -> None:
    """From what the last step had, so the rate does not jump."""
    again = RateScale().towards(4.0, 1, 3).towards(5.0, 3, 1)
    assert again.begin == 2.5
    assert again.at(3) == pytest.approx((2.5 + 5) / 2)
    assert again.at(4) == 5


def test_a_warm_up_goes_on_after_a_short_loss_of_instances() -> None:
    """All of three are killed at a factor of 2.22 and form as one, two and three again."""
    grown = RateScale().towards(3.0, 100, 40)
    assert grown.at(124) == pytest.approx(2.22, abs=0.01)
    one = grown.towards(1.0, 124, 40)
    two = one.towards(2.0, 127, 40)
    assert [one.at(125), two.at(128)] == [1.0, 2.0]
    three = two.towards(3.0, 130, 40)
    assert [three.at(130 + step) for step in range(40)] == pytest.approx([grown.at(124 + step) for step in range(40)])


def test_a_scale_of_an_older_checkpoint_is_continued() -> None:
    """It has no `top`, which was the target."""
    older = {"begin": 1.0, "target": 3.0, "since": 100, "steps": 40}
    assert msgspec.convert(older, RateScale).towards(1.0, 124, 40) == RateScale().towards(3.0, 100, 40).towards(
        1.0, 124, 40
    )
    fallen = msgspec.convert({"begin": 3.0, "target": 1.0, "since": 124, "steps": 0}, RateScale)
    assert [fallen.at(130), fallen.towards(2.0, 130, 40).at(130)] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("wrong", "named"), [({"samples": 0}, "samples"), ({"batch": 0}, "batch"), ({"epochs": 1.5}, "epochs")]
)
def test_a_schedule_has_steps_of_whole_batches(wrong: dict[str, Any], named: str) -> None:
    """The error names what is no whole number above 0."""
    with pytest.raises(SpecError, match=f"{named}.* a whole number, 1 or more"):
        schedule_steps(**{"samples": 24, "batch": 4, **wrong})
