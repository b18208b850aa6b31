"""What the learning rate does when a training grows or shrinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from edl_runtime.errors import SpecError

Scaling: TypeAlias = Literal["fixed", "linear", "sqrt"] | Callable[[int], float]
"""How the learning rate follows the number of instances: not at all, in proportion, by its square root, or by a factor
that a function of the number returns. The script's own learning rate is that of one instance."""


def factor_of(scaling: Scaling, world_size: int) -> float:
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


class Scale(msgspec.Struct, frozen=True, kw_only=True):
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

    def towards(self, target: float, step: int, warm_up_steps: int) -> Scale:
        """Return what changes the factor from what it is after `step` to `target`; down at once, up by and by."""
        now = self.at(step)
        if target == self.target:
            return self
        return Scale(begin=now, target=target, since=step, steps=warm_up_steps if target > now else 0)
