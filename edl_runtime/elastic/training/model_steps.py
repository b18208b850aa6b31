"""Steps of one model each within a batch, as of a GAN's critic and then its generator: all of them count, or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edl_runtime.elastic.errors import StepError
from edl_runtime.elastic.training.learning_rate import LearningRate
from edl_runtime.elastic.training.state_parts import Part, PartState, TrainedModel
from edl_runtime.errors import SpecError

ALL_MODELS = 0
NEXT_BATCH = -1
"""What ranks do with a batch: a step of all models; of one, which has a number from 1 on; nothing more."""


class ModelSteps:
    """The steps of one model each that the current batch has had, and how to undo them.

    Until a batch is over none of them counts: if another rank is lost, what a step has changed is put back, and the
    batch comes again. So its models are those of an undisturbed run, in whichever order a script steps and uses them.
    """

    def __init__(self, models: Sequence[TrainedModel], scaler: Part | None) -> None:
        self._models = models
        self._scaler = [] if scaler is None else [scaler]
        self._stepped: list[int] = []
        self._kept: dict[Part, PartState] = {}  # as they were before the batch; the memory is used again
        self._to_undo: list[Part] = []

    def number_of(self, model: Any) -> int:
        """Return the number of one of the models, or of all for None. Raises SpecError."""
        if model is None:
            return ALL_MODELS
        for number, each in enumerate(self._models, 1):
            if each.model is model:
                return number
        raise SpecError("run.step(of=…)", type(model).__name__, "a model, as run.wrap has returned it")

    def models(self, number: int) -> Sequence[TrainedModel]:
        """Return all models, or the one of this number."""
        return self._models[number - 1 : number] if number else self._models

    @property
    def stepped(self) -> Sequence[TrainedModel]:
        """The models that the batch has trained: all if it was not by one each."""
        return [self._models[number - 1] for number in self._stepped] or self._models

    def check(self, number: int) -> None:
        """Raise StepError if the batch has had a step already that excludes this one."""
        if self._stepped and number == ALL_MODELS:
            raise StepError(
                "run.step was called without of= after one of a single model", "give of= in each, or in none"
            )
        if number in self._stepped:
            raise StepError("run.step was called a second time for one model of a batch", "call it once for each model")

    def begin(self, number: int, *, keeps: bool) -> bool:
        """Note a step; return whether the batch is over with it. `keeps`: it may have to be undone, if it is not."""
        if number == ALL_MODELS:
            return True
        self._stepped.append(number)
        if len(self._stepped) == len(self._models):
            return True
        for part in [*self._models[number - 1].parts.values(), *self._scaler] if keeps else []:
            if part not in self._to_undo:  # the scaler is in each step
                self._kept[part] = part.kept(self._kept.get(part, PartState({})))
                self._to_undo.append(part)
        return False

    def undo(self) -> None:
        """Put back what the batch's steps have changed."""
        for part in reversed(self._to_undo):
            part.load(self._kept[part])
        self.end_batch()

    def end_batch(self) -> None:
        """Let the batch's steps count."""
        self._stepped, self._to_undo = [], []


def rates_of(models: Iterable[TrainedModel]) -> list[LearningRate]:
    """Return the learning rates of these models."""
    return [rate for model in models for rate in model.rates]


def check_same(does: Sequence[int | None], step: int) -> None:
    """Raise StepError unless all ranks with a batch do the same with it; `does` is by rank, None without a batch."""
    found = sorted({each for each in does if each is not None})
    if len(found) < 2:
        return
    names = {ALL_MODELS: "all models", NEXT_BATCH: "none, but another batch"}
    ranks = {each: [rank for rank, other in enumerate(does) if other == each] for each in found}
    told = "; ".join(f"{names.get(each, f'model {each}')} on ranks {ranks[each]}" for each in found)
    raise StepError(
        f"after step {step} ranks asked run.step for other models: {told}",
        "step the same models in the same order on all ranks, by what all know, such as run.step_number",
    )
