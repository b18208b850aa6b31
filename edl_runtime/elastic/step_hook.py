"""A look at each step of any Paddle optimizer in this process, before it changes a parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

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
            setattr(kind, method, _hooked(own))


def lbfgs_kinds() -> tuple[type, ...]:
    """Return Paddle's classes LBFGS, which have steps of their own; the deprecated one is wrapped, and may go."""
    import paddle

    places = (paddle.optimizer, paddle.incubate.optimizer)
    return tuple(inspect.unwrap(place.LBFGS) for place in places if hasattr(place, "LBFGS"))


def _hooked(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def hooked(optimizer: Any, *arguments: Any, **options: Any) -> Any:
        for each in _hooks:
            each(optimizer)
        return own(optimizer, *arguments, **options)

    hooked.calls_hooks = True  # type: ignore[attr-defined]
    return hooked
