"""Errors of elastic trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl_runtime.errors import EdlError


class ElasticError(EdlError):
    """Raised when a training can't continue with its workers, or in the way that its script asks for."""


@dataclass(eq=False, repr=False)
class GroupLostError(ElasticError, ConnectionError):
    """Raised when a generation's workers can't communicate any more. The next generation recovers from it."""

    generation: int
    reason: str

    def __str__(self) -> str:
        return (
            f"generation {self.generation} failed: {self.reason}; the next one goes on from the last step of all "
            "ranks. If that fails as well, `edl logs` shows why an instance ends"
        )


@dataclass(eq=False, repr=False)
class NoGroupError(ElasticError):
    """Raised when a worker can't sum gradients with the others, now or in a later generation of the same instances."""

    reason: str

    def __str__(self) -> str:
        return (
            f"this instance can't sum gradients with others: {self.reason}; each needs a GPU of its own, and all need "
            "the same Paddle"
        )


@dataclass(eq=False, repr=False)
class StepError(ElasticError, ValueError):
    """Raised when a script trains in another way than by `run.step` for each batch. `instead`: what to do."""

    what: str
    instead: str = "call run.step(loss=loss) once for each batch, after loss.backward()"

    def __str__(self) -> str:
        return f"{self.what}; {self.instead}"


class InitNotCalledError(ElasticError, ValueError):
    """Raised when a script that imports `edl_runtime.elastic` trains without having called `elastic.init`."""

    def __str__(self) -> str:
        return (
            "the script imports edl_runtime.elastic and never calls elastic.init: each instance would train everything "
            "alone. Call elastic.init and run.wrap before the first step, or remove the import"
        )


@dataclass(eq=False, repr=False)
class NoCheckpointError(ElasticError):
    """Raised when a job can't write the checkpoint that it was asked for."""

    job: str
    why: str

    def __str__(self) -> str:
        return f"job {self.job!r} writes no checkpoint: {self.why}"


@dataclass(eq=False, repr=False)
class EarlyEndError(ElasticError, ValueError):
    """Raised when some ranks have left the loop over the data and others have not."""

    step: int
    ranks: Sequence[int]
    world_size: int

    def __str__(self) -> str:
        which = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return (
            f"{which} of {self.world_size} left the loop over the data after step {self.step}, the others did not; "
            "decide when to end by what all ranks know, such as run.step_number or run.mean_loss"
        )


@dataclass(eq=False, repr=False)
class NotFiniteError(ElasticError, ValueError):
    """Raised on all ranks when a loss or gradients are NaN or infinite, and `not_finite` is "fail"."""

    step: int
    what: Sequence[str]

    def __str__(self) -> str:
        return (
            f"NaN or infinity in the {' and the '.join(self.what)} of step {self.step}, which is not applied; the "
            "checkpoints before it stay. Look for the cause in the learning rate, the data and the loss; with "
            "not_finite='warn' (EDL_NOT_FINITE) training continues"
        )


@dataclass(eq=False, repr=False)
class OtherModelError(ElasticError, ValueError):
    """Raised when a checkpoint, or another worker's state, does not fit what this script wraps and registers."""

    origin: str
    differences: Sequence[str]

    def __str__(self) -> str:
        shown = [f"  {difference}" for difference in self.differences[:20]]
        if len(self.differences) > len(shown):
            shown.append(f"  and {len(self.differences) - len(shown)} more")
        head = f"{self.origin} is of another model, optimizer or registered state than this script's:"
        return "\n".join([head, *shown, "Build and register the same, or use another location for checkpoints"])


@dataclass(eq=False, repr=False)
class InstanceSupersededError(ElasticError):
    """Raised by an agent when a later one has started with the same instance number."""

    job: str
    instance: int

    def __str__(self) -> str:
        return (
            f"instance {self.instance} of job {self.job!r} was started again, so this one ends; give each instance "
            "its own EDL_INSTANCE"
        )


@dataclass(eq=False, repr=False)
class JobTakenError(ElasticError):
    """Raised when another submission of a job of that name still trains."""

    job: str

    def __str__(self) -> str:
        return (
            f"instances of another submission of job {self.job!r} are running; stop that one first, or give this one "
            "another name"
        )
