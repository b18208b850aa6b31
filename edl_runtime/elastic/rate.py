"""The learning rate that a script's optimizer has: a number, or what its scheduler says."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class Held(NamedTuple):
    """A rate at one moment, as JSON: the number, or the scheduler's state; None for what it is not."""

    number: float | None
    scheduler: dict[str, Any] | None


class Rate:
    """An optimizer's rate as its script has it, without the factor that follows the number of instances.

    A script may change it in its loop: by `optimizer.set_lr`, or by moving the scheduler on. A step that is lost has
    its batch drawn again, and counts from the rate that there was when it was drawn the first time.
    """

    def __init__(self, optimizer: Any) -> None:
        rate = optimizer._learning_rate  # noqa: SLF001 -- there is no other way to the scheduler
        self.scheduler: Any = None if isinstance(rate, float) else rate
        self._optimizer = optimizer
        self._drawn: Held | None = None  # as the batch was drawn that is not applied yet
        self._again: Held | None = None  # as it is to be when the batch of a lost step is drawn again

    @property
    def value(self) -> float:
        return float(self._optimizer.get_lr())

    def held(self) -> Held:
        """Return what `put_back` takes."""
        return Held(self.value, None) if self.scheduler is None else Held(None, self.scheduler.state_dict())

    def put_back(self, held: Held) -> None:
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


def to_slots(number: float | None, rank: int, world_size: int) -> list[int]:
    """Return what a rank adds to a sum over all ranks, so that each knows the numbers of those that have one."""
    slots = [0] * world_size
    if number is not None:
        (bits,) = struct.unpack("<q", struct.pack("<d", number))
        slots[rank] = ~bits  # which is 0 for no number
    return slots


def from_slots(slots: Sequence[int]) -> list[float]:
    """Return the numbers of the ranks that have one, by rank, to the bit."""
    packed = [struct.pack("<q", ~slot) for slot in slots if slot]
    return [float(struct.unpack("<d", each)[0]) for each in packed]
