"""Errors of elastic trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl_runtime.errors import EdlError


class ElasticError(EdlError):
    """Raised when a training can't go on with the trainers that it has, or as its script wants it."""


@dataclass(eq=False, repr=False)
class GroupLostError(ElasticError, ConnectionError):
    """Raised when a generation's trainers can't talk to each other any more. The next generation mends it."""

    generation: int
    reason: str

    def __str__(self) -> str:
        return f"generation {self.generation} can't go on: {self.reason}"


@dataclass(eq=False, repr=False)
class StepError(ElasticError, ValueError):
    """Raised when a script trains in another way than by one `run.step` a batch. `instead`: what to do."""

    what: str
    instead: str = "call run.step(loss=loss) once for each batch, after loss.backward()"

    def __str__(self) -> str:
        return f"{self.what}; {self.instead}"


class InitNotCalledError(ElasticError, ValueError):
    """Raised when a script that imports `edl_runtime.elastic` trains without having called `elastic.init`."""

    def __str__(self) -> str:
        return (
            "the script imports edl_runtime.elastic and never calls elastic.init: each instance would train everything "
            "alone. Call elastic.init and run.wrap before the first step; or, if the script is to stay as it is, take "
            "the import out"
        )


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
            "decide when to end by what all ranks know, as run.step_number or run.mean_loss"
        )


@dataclass(eq=False, repr=False)
class OtherModelError(ElasticError, ValueError):
    """Raised when a checkpoint, or the state of another trainer, does not fit what this script wraps and registers."""

    origin: str
    differences: Sequence[str]

    def __str__(self) -> str:
        shown = [f"  {difference}" for difference in self.differences[:20]]
        if len(self.differences) > len(shown):
            shown.append(f"  and {len(self.differences) - len(shown)} more")
        head = f"{self.origin} is of another model, optimizer or registered state than this script's:"
        return "\n".join([head, *shown, "Build and register the same, or name another place for its checkpoints"])


@dataclass(eq=False, repr=False)
class InstanceSupersededError(ElasticError):
    """Raised when an instance was started anew, and an agent of before would go on."""

    job: str
    instance: int

    def __str__(self) -> str:
        return (
            f"instance {self.instance} of job {self.job!r} was started anew, so this one ends; give each instance that "
            "is to train its own EDL_INSTANCE"
        )


@dataclass(eq=False, repr=False)
class JobTakenError(ElasticError):
    """Raised when a job of that name was submitted anew, or another one of it still trains."""

    job: str

    def __str__(self) -> str:
        return (
            f"instances of another submission of job {self.job!r} are alive; stop that one first, or give this one "
            "another name"
        )
