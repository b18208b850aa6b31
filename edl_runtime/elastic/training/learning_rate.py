"""The learning rate of an optimizer, agreed on by all ranks, and its scaling with the number of instances."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from edl_runtime.errors import SpecError


class LearningRate:
    """An optimizer's rate as its script sets it, without the factor for the number of instances.

    A script may change it in its loop, by `optimizer.set_lr` or by stepping the scheduler. The batch of a lost step
    comes again, and then the rate is the one from when it came first.
    """

    def __init__(self, optimizer: Any) -> None:
        rate = optimizer._learning_rate  # noqa: SLF001 -- there is no other way to the scheduler
        self.scheduler: Any = None if isinstance(rate, float) else rate
        self._optimizer = optimizer
        self._initial = self._numbers()
        self._at_batch: dict[str, Any] | None = None  # when the current batch came
        self._at_repeat: dict[str, Any] | None = None  # to restore when the batch of a lost step comes again

    @property
    def value(self) -> float:
        return float(self._optimizer.get_lr())

    def state(self) -> dict[str, Any]:
        """Return the number, or the scheduler's state, as JSON.

        `changed`: its numbers that are not in its state_dict and have changed since it was wrapped, as the T_cur of
        CosineAnnealingWarmRestarts. What has not changed is a setting, which a later run's script may give anew.
        """
        if self.scheduler is None:
            return {"rate": self.value}
        now = self._numbers()
        changed = {name: each for name, each in now.items() if each != self._initial.get(name) and math.isfinite(each)}
        state = {"scheduler": self.scheduler.state_dict(), "changed": changed}
        plain: dict[str, Any] = msgspec.to_builtins(state, enc_hook=_plain_number)
        return plain

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state, if it is of this kind: a number, or a scheduler's."""
        number, scheduler = state.get("rate"), state.get("scheduler")
        if self.scheduler is None and number is not None:
            self._set(number)
        elif self.scheduler is not None and scheduler is not None:
            changed = state.get("changed")
            if changed is None:
                _catch_up(self.scheduler, scheduler)
            else:
                vars(self.scheduler).update(self._initial | changed)
            self.scheduler.set_state_dict(scheduler)

    def note_batch(self) -> None:
        """Note that the script gets the first batch of a step."""
        if self._at_repeat is not None:
            self.load(self._at_repeat)
        self._at_batch, self._at_repeat = self.state(), None

    def undo_step(self) -> None:
        """Restore the rate from before a lost step."""
        before = self._at_batch if self._at_repeat is None else self._at_repeat  # a step may be lost twice
        if before is not None:
            self.load(before)

    def await_repeat(self) -> None:
        """Restore the present rate when the batch of a lost step comes again.

        What the script changes until then belongs to the lost step.
        """
        self._at_repeat = self.state()

    def end_batch(self) -> None:
        """Note that the batch is over: its step can't be lost any more."""
        self._at_batch = self._at_repeat = None

    @contextlib.contextmanager
    def of_step(self, rate: float, factor: float) -> Iterator[None]:
        """Have the optimizer step with `rate` times `factor`. A number is `rate` from then on, on all ranks."""
        own = None if self.scheduler is None else self.scheduler.last_lr
        try:
            if self.scheduler is None:
                self._set(rate * factor)
            else:
                self.scheduler.last_lr = rate * factor
            yield
        finally:
            if self.scheduler is None:
                self._set(rate)
            else:
                self.scheduler.last_lr = own

    def _numbers(self) -> dict[str, Any]:
        """Return a scheduler's numbers that its state_dict lacks, settings included."""
        if self.scheduler is None:
            return {}
        held, kept = vars(self.scheduler), self.scheduler.state_dict()
        return {name: each for name, each in held.items() if isinstance(each, _NUMBERS) and name not in kept}

    def _set(self, number: float) -> None:
        if number != self.value:  # set_lr takes ten times as long as the comparison
            self._optimizer.set_lr(number)


_NUMBERS = (bool, int, float, np.integer, np.floating)


def _plain_number(value: Any) -> Any:
    """Return a number of numpy's as one of Python's. Raises SpecError for what JSON can't hold."""
    if isinstance(value, np.generic):
        return value.item()
    raise SpecError("the LRScheduler's state_dict", type(value).__name__, "values that JSON holds")


def _catch_up(scheduler: Any, state: dict[str, Any]) -> None:
    """Have a scheduler find by its epoch what checkpoints of earlier versions lack."""
    from paddle.optimizer.lr import CosineAnnealingWarmRestarts

    if isinstance(scheduler, CosineAnnealingWarmRestarts):
        CosineAnnealingWarmRestarts.step(scheduler, state["last_epoch"])  # its own `step` may be refused


def encode_slots(number: float | None, rank: int, world_size: int) -> list[int]:
    """Return what a rank adds to a sum over all ranks, so that each learns the numbers of those that have one."""
    slots = [0] * world_size
    if number is not None:
        slots[rank] = ~int(np.float64(number).view(np.int64))  # which is 0 for no number
    return slots


def decode_slots(slots: Sequence[int]) -> list[float]:
    """Return the numbers of the ranks that have one, by rank, bit for bit."""
    return [float(np.int64(~slot).view(np.float64)) for slot in slots if slot]


Scaling: TypeAlias = Literal["fixed", "linear", "sqrt"] | Callable[[int], float]
"""How the learning rate follows the number of instances: not at all, in proportion, by its square root, or by a
function of the number that returns a factor. The script's own learning rate is that of one instance."""


def scaling_factor(scaling: Scaling, world_size: int) -> float:
    """Return the factor of the script's learning rate. Raises SpecError for an invalid scaling."""
    match scaling:
        case "fixed":
            return 1.0
        case "linear":
            return float(world_size)
        case "sqrt":
            return math.sqrt(world_size)
    if not callable(scaling):
        raise SpecError("scaling", scaling, "'fixed', 'linear', 'sqrt' or a function of the number of instances")
    factor: object = scaling(world_size)
    if not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise SpecError(f"scaling({world_size})", factor, "a number above 0")
    return float(factor)


class RateScale(msgspec.Struct, frozen=True, kw_only=True):
    """The factor of the learning rate: it is `target` at most, and warms up to what no step has had yet.

    From step `since` on the warm-up goes from `begin`, which was reached before, to `top`, in `steps` steps. Where a
    smaller group wants less, it rests. What was reached stays so for good, however long the group is smaller: the
    optimizer has seen that rate. `top` of 0, in checkpoints of earlier versions, is the target.
    """

    begin: float = 1.0
    target: float = 1.0
    since: int = 0
    steps: int = 0
    top: float = 0.0

    def at(self, step: int) -> float:
        """Return the factor for the step after so many."""
        return min(self.target, self._warmed_up(step + 1))

    def towards(self, target: float, step: int, warm_up_steps: int) -> RateScale:
        """Return the scale of a group that wants `target` after `step` steps.

        It goes down at once, and at once up to what was reached; then it continues the warm-up, or begins one of
        `warm_up_steps` to a target above that.
        """
        if target == self.target:
            return self
        if step:
            reached, top = max(self.begin, min(self.target, self._warmed_up(step))), max(self.top, self.target)
        else:  # no step has had anything
            reached = top = min(1.0, target)
        if target > top:
            return RateScale(begin=reached, target=target, since=step, steps=warm_up_steps, top=target)
        left = round((self.steps + 1) * (top - reached) / (top - self.begin)) if reached < top else 0
        return RateScale(begin=reached, target=target, since=step, steps=max(0, left - 1), top=top)

    def _warmed_up(self, step: int) -> float:
        """Return how far the warm-up is with `step` steps, if it does not rest."""
        top, done = max(self.top, self.target), step - self.since
        if done > self.steps:
            return top
        return self.begin + (top - self.begin) * done / (self.steps + 1)
