"""The optimizer step of all ranks: sums gradients, and lets nothing but `run.step` change parameters.

Any other change would make ranks differ, and raises StepError.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from edl_runtime.checkpoint.finite import all_finite, pieces
from edl_runtime.elastic.comm.process_group import ProcessGroup
from edl_runtime.elastic.errors import StepError
from edl_runtime.elastic.training.learning_rate import LearningRate
from edl_runtime.elastic.training.state_parts import as_bits, host_view, lbfgs_kinds, parameters_of, some_of

SAMPLES = 16
"""How many values of each parameter are compared: all of them would take as long as a step of the optimizer."""

MAX_NAMED = 5
"""Parameters that an error lists."""

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
"""Optimizer methods that a script may not call during training, and what to do instead."""

_SCALER = "leave that line out: run.step does it, as run.wrap has the scaler"
_REFUSED_OF_SCALER = dict.fromkeys(("step", "minimize", "update", "unscale_", "load_state_dict"), _SCALER)
_SCHEDULE = (
    "leave that line out: run.step does it. Say when by run.wrap(schedule=...): 'step' for each step, which is the "
    "default, 'samples' for each step that one instance would make, 'epoch' for a scheduler that is stepped at each "
    "epoch's end, None where the script does it"
)
_CLEARED = ("clear_grad", "clear_gradients")

_wrapped: weakref.WeakSet[Any] = weakref.WeakSet()
"""The optimizers of all trainings of this process."""


class OptimizerGuard:
    """Steps optimizers, and their schedulers unless the script does.

    From `begin` until the training is `over`, methods that would change what is trained raise StepError, also those of
    optimizers that are not wrapped. Methods that clear gradients remove them, where Paddle's own leave zeros: so a
    missing gradient is noticed.

    All parameters are watched but those that were frozen at `wrap`: a script may change these, and buffers, itself. See
    `FrozenPart`.

    - `pairs`: models and their optimizers. `scaler`: the GradScaler of their losses, if any.
    - `moves_schedulers`: whether `run.step` steps the schedulers.
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
        self._steps = False  # while True the refused methods may be called
        models = {id(model): model for model, _ in pairs}.values()
        prefixes = [f"model-{number}/" if number > 1 else "" for number in range(1, len(models) + 1)]
        named = [
            (prefix + name, each)
            for prefix, model in zip(prefixes, models, strict=True)
            for name, each in model.named_parameters()
        ]
        trained = {parameter.name for optimizer in self._optimizers for parameter in parameters_of(optimizer)}
        fixed = [(name, each) for name, each in named if each.stop_gradient or each.name in trained]
        self._fixed = [(name, each, each.stop_gradient) for name, each in fixed]
        own = [(name, each) for name, each in named if not each.stop_gradient and each.place.is_cpu_place()]
        self._samples = {name: _sample(each) for name, each in own}
        self._noted = self._values()

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
        before_each_step(self._refuse_unwrapped)

    def step(self) -> None:
        """Step each optimizer that has gradients, and clear them. A scaler skips a step that overflows."""
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

    def move_schedulers(self, rates: Iterable[LearningRate]) -> None:
        """Step the schedulers of these rates, each once, unless the script does."""
        moved = {id(rate.scheduler) for rate in rates}
        with self._stepping():
            for scheduler in self._schedulers:
                if id(scheduler) in moved:
                    scheduler.step()

    def note(self) -> None:
        """Take the parameters' present values as correct."""
        self._noted = self._values()

    def check(self) -> None:
        """Raise StepError if parameters were changed, frozen or unfrozen since `note`, except by `step`.

        Values are compared on the CPU only, and not all of them.
        """
        changed = [name for name, each, frozen in self._fixed if each.stop_gradient != frozen]
        if changed:
            raise StepError(
                f"stop_gradient of {_name_parameters(changed)} has changed since run.wrap",
                "make everything that is ever trained trainable before run.wrap; to freeze a parameter for a while, "
                "drop its gradient on all ranks, by parameter.clear_gradient(False) before run.step",
            )
        values = self._values()
        if np.array_equal(values, self._noted):
            return
        ends = np.cumsum([len(each) for each in self._samples.values()])
        differs = np.split(values != self._noted, ends[:-1])
        changed = [name for name, where in zip(self._samples, differs, strict=True) if where.any()]
        raise StepError(
            f"{_name_parameters(changed)} changed outside of run.step",
            "give run.wrap the optimizers of everything that is trained, and load weights before it; for parameters "
            "that the script changes itself, alike on all ranks, such as a momentum encoder, set stop_gradient = True "
            "first",
        )

    def _values(self) -> np.ndarray:
        return np.concatenate(list(self._samples.values())) if self._samples else np.empty(0)

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        self._steps = True
        try:
            yield
        finally:
            self._steps = False

    def _refuse(self, owner: Any, called: str, refused: Mapping[str, str]) -> None:
        for name, instead in refused.items():
            setattr(owner, name, self._refused(getattr(owner, name), f"{called}.{name}()", instead))

    def _refused(self, own: Callable[..., Any], what: str, instead: str) -> Callable[..., Any]:
        @functools.wraps(own)
        def refuse(*arguments: Any, **options: Any) -> Any:
            if self._steps or self._over():
                return own(*arguments, **options)
            raise StepError(f"the script called {what}", f"{instead}. After run.finish() the script may call it")

        return refuse

    def _refuse_unwrapped(self, optimizer: Any) -> None:
        if optimizer in _wrapped or self._over():
            return
        raise StepError(
            f"the script called a step of {type(optimizer).__name__}, an optimizer that run.wrap was not given",
            "give run.wrap each model with its optimizer, as in run.wrap((generator, optimizer), (critic, other)), and "
            "let run.step do the steps. After run.finish() the script may step it itself",
        )

    def _cleared(self, own: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own)
        def clear(set_to_zero: bool = True) -> None:  # noqa: FBT001, FBT002 -- Paddle's signature
            own(set_to_zero=set_to_zero and self._over())

        return clear


def _sample(parameter: Any) -> np.ndarray:
    """Return a view of some of its values, as bits."""
    return as_bits(some_of(host_view(parameter).reshape(-1), SAMPLES))


def _name_parameters(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"parameter{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:MAX_NAMED]))}{more}"


Hook = Callable[[Any], None]

_hooks: list[Hook] = []


def before_each_step(hook: Hook) -> None:
    """Call `hook` with each optimizer before it steps, from now on. It may raise an error instead.

    Paddle has no such hook; this wraps the methods by which all optimizers change parameters, `minimize` included. It
    may be called more than once for a step.
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


# The gradients of a global batch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_ON_HEAP = 1 << 25  # glibc's maximum
_MOST_KEPT = 1 << 30


class StepSums(NamedTuple):
    """What all ranks know of a step before they apply it, the same on each.

    `loss`: the mean, None if a rank did not give its own. `finite`: no gradient is NaN or infinite.
    """

    loss: float | None
    finite: bool


class HostGradients:
    """The weighted sum of a step's gradients and losses on the CPU, in one array that is kept from step to step.

    A parameter without a gradient counts as zero on this rank; without one on any rank it has none in the end. Sums are
    in float32, or float64 if any gradient is. Where a parameter has the array's type its gradient is a view of it:
    nothing is copied.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        import paddle

        self._parameters = list(parameters)
        sizes = [int(np.prod(parameter.shape)) for parameter in self._parameters]
        double = any(parameter.dtype == paddle.float64 for parameter in self._parameters)
        more = len(sizes) + 2  # whether a rank has that gradient; how often the loss is not given; and the loss
        self._flat = np.zeros(sum(sizes) + more, np.float64 if double else np.float32)
        ends = np.cumsum(sizes)
        self._views = [
            self._flat[end - size : end].reshape(parameter.shape)
            for parameter, size, end in zip(self._parameters, sizes, ends, strict=True)
        ]
        self._has = self._flat[len(self._flat) - more : -2]
        self._dtype = paddle.float64 if double else paddle.float32
        self._begun = False
        _keep_what_is_freed(2 * self._flat.nbytes)

    def add(self, weight: float, loss: float | None) -> None:
        """Add the parameters' gradients times `weight`, and clear them."""
        if not self._begun:
            self._has[:] = 0
            self._flat[-2:] = 0
        for number, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if parameter.grad is None:
                if not self._begun:
                    view[...] = 0
                continue
            if self._begun:
                np.add(view, weight * _plain(_dense(parameter)), out=view)
            else:
                np.multiply(_plain(_dense(parameter)), weight, out=view, casting="unsafe")
            self._has[number] = 1
            parameter.clear_gradient(False)
        if loss is None:
            self._flat[-2] += 1
        else:
            self._flat[-1] += weight * loss
        self._begun = True

    def discard(self) -> None:
        """Drop what was added."""
        self._begun = False

    def reduce(self, group: ProcessGroup, total: float) -> StepSums:
        """Sum over all ranks, divide by `total`, and set the parameters' gradients."""
        import paddle
        from paddle.utils import dlpack

        if not self._begun:
            self._flat[:] = 0
        group.all_reduce(self._flat)
        self._begun = False
        finite = True
        for parameter, view, has in zip(self._parameters, self._views, self._has, strict=True):
            if not has:
                continue
            for piece in pieces(view):
                np.divide(piece, total, out=piece)
                finite = finite and all_finite(piece)  # while it is in the cache
            if parameter.dtype == self._dtype:
                parameter.grad_ = dlpack.from_dlpack(view)  # which shares memory, where `grad` copies
            else:
                parameter.grad_ = paddle.to_tensor(view).astype(parameter.dtype)
        unknown, loss = self._flat[-2:]
        return StepSums(None if unknown else float(loss) / total, finite)

    def own_finite(self) -> bool:
        """Return whether the gradients of this rank are finite, by some values of each: to read all takes long."""
        held = (host_view(each.grad) for each in self._parameters if each.grad is not None)
        return all(all_finite(some_of(gradient.reshape(-1), SAMPLES)) for gradient in held)


class DeviceGradients:
    """Has the methods of `HostGradients`, on a GPU; gradients are packed at each step."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = list(parameters)
        self._sizes = [int(np.prod(parameter.shape)) for parameter in self._parameters]
        self._flat: Any = None

    def add(self, weight: float, loss: float | None) -> None:
        import paddle

        has = [parameter.grad is not None for parameter in self._parameters]
        pieces = [
            _dense(parameter).flatten().astype("float32") if there else paddle.zeros([size])
            for parameter, size, there in zip(self._parameters, self._sizes, has, strict=True)
        ]
        more = paddle.to_tensor([*map(float, has), float(loss is None), (loss or 0.0) * weight])
        flat = paddle.concat([paddle.concat(pieces) * weight, more])
        self._flat = flat if self._flat is None else self._flat + flat
        for parameter in self._parameters:
            parameter.clear_gradient(False)

    def discard(self) -> None:
        self._flat = None

    def reduce(self, group: ProcessGroup, total: float) -> StepSums:
        import paddle

        count = len(self._sizes)
        flat = paddle.zeros([sum(self._sizes) + count + 2]) if self._flat is None else self._flat
        group.all_reduce(flat)
        self._flat = None
        *summed, more = paddle.split(flat, [*self._sizes, count + 2])
        finite = flat[: sum(self._sizes)].isfinite().all().astype(flat.dtype).reshape([1])
        *has, unknown, loss, is_finite = map(float, paddle.concat([more, finite]).numpy())  # one transfer
        for parameter, values, there in zip(self._parameters, summed, has, strict=True):
            if there:
                parameter.grad_ = (values / total).reshape(parameter.shape).astype(parameter.dtype)
        return StepSums(None if unknown else loss / total, bool(is_finite))

    def own_finite(self) -> bool:
        import paddle

        finite = [each.grad.isfinite().all() for each in self._parameters if each.grad is not None]
        return bool(paddle.stack(finite).all())


Gradients: TypeAlias = HostGradients | DeviceGradients


def any_sparse(parameters: Sequence[Any]) -> bool:
    """Whether any gradient is of some rows only, as of an Embedding(sparse=True)."""
    return any(each.grad is not None and each.grad.is_selected_rows() for each in parameters)


def _dense(parameter: Any) -> Any:
    """Return the gradient as a whole: sparse ones of other ranks have other rows, and can't be summed."""
    import paddle

    gradient = parameter.grad
    if not gradient.is_selected_rows():
        return gradient
    values, rows = gradient._get_tensor_from_selected_rows(), gradient.rows()  # noqa: SLF001 -- its own way warns
    return paddle.index_add(paddle.zeros(parameter.shape, values.dtype), paddle.to_tensor(rows), 0, values)


def _plain(gradient: Any) -> np.ndarray:
    """Return it as an array that can be weighted without loss: 16 bits may not hold the product."""
    import paddle

    is_half = gradient.dtype in (paddle.bfloat16, paddle.float16)
    return host_view(gradient.astype("float32") if is_half else gradient)


def _keep_what_is_freed(size: int) -> None:
    """Have glibc keep so many freed bytes: each step frees its gradients, and the next needs as much."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MOST_ON_HEAP)
        mallopt(_M_TRIM_THRESHOLD, min(max(size, 2 * _MOST_ON_HEAP), _MOST_KEPT))
