"""Optimizer steps happen in `run.step` only.

What else a script does to its model and optimizer would make ranks differ, and raises StepError.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from edl_runtime.elastic.errors import StepError
from edl_runtime.elastic.training.learning_rate import LearningRate
from edl_runtime.elastic.training.state_parts import host_view, lbfgs_kinds, parameters_of

SAMPLES = 16
"""About so many values of each parameter are looked at: all of them would take as long as a step of the optimizer."""

MAX_NAMED = 5
"""Parameters that an error names; of the others it says how many there are."""

_STEP = (
    "leave that line out: run.step does it, with the gradients of all ranks. Where a GradScaler called it, leave out "
    "its step() and update(), and give it to run.wrap(scaler=scaler)"
)
_LOAD = "load what a training is to begin with before run.wrap"
_REFUSED = {
    "step": _STEP,
    "minimize": _STEP,
    "apply_gradients": _STEP,
    "set_state_dict": _LOAD,
    "load_state_dict": _LOAD,
    "set_lr_scheduler": "give the optimizer its scheduler before run.wrap",
}
"""Methods of an optimizer that a script may not call while it is trained by `run.step`, and what to do instead."""

_SCALER = "leave that line out: run.step does it, as run.wrap has the scaler"
_REFUSED_OF_SCALER = dict.fromkeys(("step", "minimize", "update", "unscale_", "load_state_dict"), _SCALER)
_SCHEDULE = (
    "leave that line out: run.step does it. Say when by run.wrap(schedule=...): 'step' for each step, which is the "
    "default, 'epoch' for a scheduler that is stepped at each epoch's end, None where the script does it"
)
_CLEARED = ("clear_grad", "clear_gradients")

_wrapped: weakref.WeakSet[Any] = weakref.WeakSet()
"""The optimizers of all trainings of this process."""


class OptimizerGuard:
    """The one way to the steps of optimizers, and to those of their schedulers if it is not the script that moves them.

    From `begin` until the training is `over` the methods that would change what is trained raise StepError, those of
    optimizers that are not wrapped among them, and those that clear gradients leave none, where Paddle's leave zeros:
    so a gradient that is missing is noticed.

    Parameters are watched, be they an optimizer's or nobody's, unless they were frozen at `wrap`: those, and buffers,
    a script may change, each rank for itself.

    - `pairs`: models and their optimizers. `scaler`: a GradScaler by which their losses are scaled, if any.
    - `moves_schedulers`: whether it is not the script that does.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Any, Any]],
        *,
        scaler: Any = None,
        moves_schedulers: bool,
        over: Callable[[], bool],
    ) -> None:
        self._optimizers = [optimizer for _, optimizer in pairs]
        self._scaler = scaler
        schedulers = [LearningRate(optimizer).scheduler for optimizer in self._optimizers] if moves_schedulers else []
        self._schedulers = list({id(each): each for each in schedulers if each is not None}.values())
        self._over = over
        self._steps = False  # so what is refused may be called
        models = {id(model): model for model, _ in pairs}.values()
        prefixes = [f"model-{number}/" if number > 1 else "" for number in range(1, len(models) + 1)]
        named = [
            (prefix + name, each)
            for prefix, model in zip(prefixes, models, strict=True)
            for name, each in model.named_parameters()
        ]
        trained = {parameter.name for optimizer in self._optimizers for parameter in parameters_of(optimizer)}
        fixed = [(name, each) for name, each in named if each.stop_gradient or each.name in trained]
        self._fixed_names = [name for name, _ in fixed]
        self._fixed = [each for _, each in fixed]
        self._frozen = [each.stop_gradient for each in self._fixed]
        own = [(name, each) for name, each in named if not each.stop_gradient and each.place.is_cpu_place()]
        self._own_names = [name for name, _ in own]
        self._samples = [_sample(each) for _, each in own]
        self._seen = b""  # of the samples

    def begin(self) -> None:
        """Refuse and watch from now on."""
        for optimizer in self._optimizers:
            self._refuse(optimizer, "optimizer", _REFUSED)
            for name in _CLEARED:
                setattr(optimizer, name, self._cleared(getattr(optimizer, name)))
        for scheduler in self._schedulers:
            own = scheduler.step
            scheduler.step = self._refused(own, "step() of the optimizer's LRScheduler", _SCHEDULE)
        if self._scaler is not None:
            self._refuse(self._scaler, "scaler", _REFUSED_OF_SCALER)
        _wrapped.update(self._optimizers)
        before_each_step(self._refuse_stranger)

    def step(self) -> None:
        """Let each optimizer step by the gradients that there are, and take them away; one without any stays as it is.

        The gradients are those of the scaled losses if there is a scaler, which then leaves out a step that overflows.
        """
        with self._stepping():
            for optimizer in self._optimizers:
                if all(each.grad is None for each in parameters_of(optimizer)):
                    continue
                if self._scaler is None:
                    optimizer.step()
                else:
                    self._scaler.step(optimizer)
                optimizer.clear_grad(set_to_zero=False)
            if self._scaler is not None:
                self._scaler.update()
        self.note()

    def move_schedulers(self) -> None:
        """Let the schedulers step, if it is not the script that does."""
        with self._stepping():
            for scheduler in self._schedulers:
                scheduler.step()

    def note(self) -> None:
        """Note that parameters are as they should be."""
        self._seen = self._values()

    def check(self) -> None:
        """Raise StepError if parameters were changed, frozen or unfrozen by anybody but `step`, since `note`.

        Values are looked at on the CPU only, and not all of them.
        """
        frozen = [each.stop_gradient for each in self._fixed]
        if frozen != self._frozen:
            self._raise_frozen(frozen)
        values = self._values()
        if values != self._seen:
            self._raise_changed(values)

    def _values(self) -> bytes:
        return np.concatenate(self._samples).tobytes() if self._samples else b""

    def _raise_frozen(self, frozen: Sequence[bool]) -> None:
        changed = [
            name for name, now, before in zip(self._fixed_names, frozen, self._frozen, strict=True) if now != before
        ]
        raise StepError(
            f"stop_gradient of {_name_parameters(changed)} is another than at run.wrap",
            "make all that is ever trained trainable before run.wrap; to hold a parameter still for a while, drop its "
            "gradient on all ranks, by parameter.clear_gradient(False) before run.step",
        )

    def _raise_changed(self, values: bytes) -> None:
        ends = np.cumsum([len(each) for each in self._samples])
        kind = np.result_type(*self._samples)
        differs = np.split(np.frombuffer(values, kind) != np.frombuffer(self._seen, kind), ends[:-1])
        changed = [name for name, where in zip(self._own_names, differs, strict=True) if where.any()]
        raise StepError(
            f"{_name_parameters(changed)} changed beside run.step, as by hand",
            "let run.wrap have the optimizers of all that is trained, and load weights before it; what the script "
            "moves by itself on each rank, as a momentum encoder, has stop_gradient = True by then",
        )

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        self._steps = True
        try:
            yield
        finally:
            self._steps = False

    def _refuse(self, owner: Any, word: str, refused: Mapping[str, str]) -> None:
        for name, instead in refused.items():
            setattr(owner, name, self._refused(getattr(owner, name), f"{word}.{name}()", instead))

    def _refused(self, own: Callable[..., Any], what: str, instead: str) -> Callable[..., Any]:
        @functools.wraps(own)
        def refuse(*arguments: Any, **options: Any) -> Any:
            if self._steps or self._over():
                return own(*arguments, **options)
            raise StepError(f"the script called {what}", f"{instead}. After run.finish() it may")

        return refuse

    def _refuse_stranger(self, optimizer: Any) -> None:
        if optimizer in _wrapped or self._over():
            return
        raise StepError(
            f"the script let another optimizer step, {type(optimizer).__name__}, which run.wrap was not given",
            "give run.wrap each model with its optimizer, as in run.wrap((generator, optimizer), (critic, other)), and "
            "let run.step do the steps. After run.finish() it may",
        )

    def _cleared(self, own: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own)
        def clear(set_to_zero: bool = True) -> None:  # noqa: FBT001, FBT002 -- Paddle's signature
            own(set_to_zero=set_to_zero and self._over())

        return clear


def _sample(parameter: Any) -> np.ndarray:
    """Return a view of some of its values, as bits, across all of it."""
    flat = host_view(parameter).reshape(-1)
    step = max(1, flat.size // SAMPLES) | 1  # odd, so that it does not stay in one column
    return flat.view(f"u{flat.itemsize}")[::step]


def _name_parameters(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"parameter{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:MAX_NAMED]))}{more}"


# A look at each step of any Paddle optimizer in this process, before it changes a parameter.

Hook = Callable[[Any], None]

_hooks: list[Hook] = []


def before_each_step(hook: Hook) -> None:
    """Have `hook` called with each optimizer that is about to step, from now on. It may raise an error instead.

    Optimizers of Paddle have no such hook; this is on the methods by which all of them change parameters, also in
    `minimize`. It may be called more than once for a step.
    """
    import paddle

    _hooks.append(hook)
    every = paddle.optimizer.Optimizer
    own_steps = [(kind, "step") for kind in lbfgs_kinds()]
    for kind, method in ((every, "_apply_optimize"), (every, "apply_gradients"), *own_steps):
        own = getattr(kind, method)
        if not getattr(own, "calls_hooks", False):
            setattr(kind, method, _with_hooks(own))


def _with_hooks(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def hooked(optimizer: Any, *arguments: Any, **options: Any) -> Any:
        for each in _hooks:
            each(optimizer)
        return own(optimizer, *arguments, **options)

    hooked.calls_hooks = True  # type: ignore[attr-defined]
    return hooked
