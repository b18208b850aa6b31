"""The learning rate of an optimizer, agreed on by all ranks, and its scaling with the number of instances."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from edl_runtime.errors import SpecError


class RateState(NamedTuple):
    """A rate at one moment, as JSON: the number, or the scheduler's state; None for what it is not."""

    number: float | None
    scheduler: dict[str, Any] | None


class LearningRate:
    """An optimizer's rate as its script has it, without the factor that follows the number of instances.

    A script may change it in its loop: by `optimizer.set_lr`, or by moving the scheduler on. A step that is lost has
    its batch drawn again, and counts from the rate that there was when it was drawn the first time.
    """

    def __init__(self, optimizer: Any) -> None:
        rate = optimizer._learning_rate  # noqa: SLF001 -- there is no other way to the scheduler
        self.scheduler: Any = None if isinstance(rate, float) else rate
        self._optimizer = optimizer
        self._drawn: RateState | None = None  # as the batch was drawn that is not applied yet
        self._again: RateState | None = None  # as it is to be when the batch of a lost step is drawn again

    @property
    def value(self) -> float:
        return float(self._optimizer.get_lr())

    def held(self) -> RateState:
        """Return what `put_back` takes."""
        return RateState(self.value, None) if self.scheduler is None else RateState(None, self.scheduler.state_dict())

    def put_back(self, held: RateState) -> None:
        """Be as it was then, if it was of this kind."""
        if self.scheduler is None and held.number is not None:
            self._set(held.number)
        elif self.scheduler is not None and held.scheduler is not None:
            self.scheduler.set_state_dict(held.scheduler)

    def draw(self) -> None:
        """Note that the script gets the first batch of a step."""
        if self._again is not None:
            self.put_back(self._again)
        self._drawn, self._again = self.held(), None

    @contextlib.contextmanager
    def lost(self) -> Iterator[None]:
        """Go back to before the lost step for what is done meanwhile, and again when its batch is drawn again.

        What the script does in between is done for a step that has not been.
        """
        before = self._drawn if self._again is None else self._again  # lost twice before it was drawn again
        if before is not None:
            self.put_back(before)
        yield
        self._again = self.held()

    @contextlib.contextmanager
    def agreed(self, rate: float, factor: float) -> Iterator[None]:
        """Let the optimizer take a step by `rate` times `factor`. A number is `rate` from then on, on all ranks."""
        self._drawn = self._again = None
        if self.scheduler is None:
            self._set(rate * factor)
            try:
                yield
            finally:
                self._set(rate)
            return
        own = self.scheduler.last_lr
        self.scheduler.last_lr = rate * factor
        try:
            yield
        finally:
            self.scheduler.last_lr = own

    def _set(self, number: float) -> None:
        if number != self.value:  # Paddle's way takes ten times as long
            self._optimizer.set_lr(number)


def encode_slots(number: float | None, rank: int, world_size: int) -> list[int]:
    """Return what a rank adds to a sum over all ranks, so that each knows the numbers of those that have one."""
    slots = [0] * world_size
    if number is not None:
        (bits,) = struct.unpack("<q", struct.pack("<d", number))
        slots[rank] = ~bits  # which is 0 for no number
    return slots


def decode_slots(slots: Sequence[int]) -> list[float]:
    """Return the numbers of the ranks that have one, by rank, to the bit."""
    packed = [struct.pack("<q", ~slot) for slot in slots if slot]
    return [float(struct.unpack("<d", each)[0]) for each in packed]


# What the learning rate does when a training grows or shrinks.

Scaling: TypeAlias = Literal["fixed", "linear", "sqrt"] | Callable[[int], float]
"""How the learning rate follows the number of instances: not at all, in proportion, by its square root, or by a factor
that a function of the number returns. The script's own learning rate is that of one instance."""


def scaling_factor(scaling: Scaling, world_size: int) -> float:
    """Return what to multiply the script's learning rate by. Raises SpecError for what is no scaling."""
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
    """The factor of the learning rate: `target` since `since`, after `steps` steps on the way there from `begin`."""

    begin: float = 1.0
    target: float = 1.0
    since: int = 0
    steps: int = 0

    def at(self, step: int) -> float:
        """Return the factor for the step that comes after so many."""
        done = step - self.since
        if done >= self.steps:
            return self.target
        return self.begin + (self.target - self.begin) * (done + 1) / (self.steps + 1)

    def towards(self, target: float, step: int, warm_up_steps: int) -> RateScale:
        """Return what changes the factor from what it is after `step` to `target`; down at once, up by and by."""
        now = self.at(step)
        if target == self.target:
            return self
        return RateScale(begin=now, target=target, since=step, steps=warm_up_steps if target > now else 0)
